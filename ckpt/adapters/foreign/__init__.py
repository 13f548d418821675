"""Checkpoints of other libraries, read and written box by box, and their way into ours and out of it.

A reader is a `ckpt.engine.stream.Source`; `formats` finds the one for a directory. `into` writes any source as a step
of one of our roots. A writer takes a source and makes files of its library; what these cannot hold goes into a sidecar.
Foreign pickles are read by a reader that knows a few harmless classes, or by torch's weights-only loader: nothing that
they hold is ever executed.
"""
