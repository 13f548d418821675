"""The save/load API that a training loop calls. May import everything but the command line.

Start reading at `checkpointer.Checkpointer`; `resharding.reshard_` needs no store.
"""

from ckpt.trainer.checkpointer import Checkpointer, Receipt, Restored
from ckpt.trainer.resharding import Resharded, reshard_

__all__ = ["Checkpointer", "Receipt", "Resharded", "Restored", "reshard_"]
