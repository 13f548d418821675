"""The save pipeline (plan, digest, exchange, write, receipt, commit) and the load pipeline (plan, read once, exchange,
place, verify), over any state that an adapter has captured.

May import geometry, native, fingerprint, state and store. Start reading at `save.save` and `load.load`; `comm` is how
ranks talk and fail together, `merge` how their parts become one state, `faults` the named points for tests.
"""
