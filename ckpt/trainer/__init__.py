"""The save/load API that a training loop calls. May import everything but the command line.

Start reading at `checkpointer.Checkpointer`.
"""

from ckpt.trainer.checkpointer import Checkpointer, Receipt, Restored

__all__ = ["Checkpointer", "Receipt", "Restored"]
