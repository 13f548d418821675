"""Looking at checkpoints at rest: addresses, lists, descriptions, verification and differences. One process, no ranks.

May import geometry, fingerprint, state and store. Start reading at `address` and `committed`; `listing`, `verify` and
`diff` stand on them. What is found comes back as frozen records; the command line prints them.
"""
