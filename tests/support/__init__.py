"""Helpers that tests, demos and benchmarks share: N ranks (`ranks`), a real S3 server (`s3`), free ports.

Nothing here imports pytest, and nothing imports torch before a rank has started.
"""
