"""Bytes at rest: Zarr v3 arrays through TensorStore, small objects, the log, attempts, receipts and commits.

May import geometry, fingerprint and state. Start reading at `log` (what is true), then `records` (the
documents of an attempt), `commit` (how an attempt becomes a checkpoint), `arrays` (where tensors lie) and `objects`
(the store's verbs). `retention` says what to keep, `collect` deletes the rest, `leases` hold on to what is in use.
"""
