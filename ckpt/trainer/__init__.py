"""The save/load API that a training loop calls. May import everything but the command line.

Start reading at `checkpointer.Checkpointer`; `resharding.reshard_` needs no store.
"""

from ckpt.trainer.background import PendingSave
from ckpt.trainer.checkpointer import Checkpointer
from ckpt.trainer.preemption import Preempted
from ckpt.trainer.resharding import Resharded, reshard_
from ckpt.trainer.results import Receipt, Restored

__all__ = ["Checkpointer", "PendingSave", "Preempted", "Receipt", "Resharded", "Restored", "reshard_"]
