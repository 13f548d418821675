"""From what a trainer holds to a `Captured` state: plain modules and optimizers, DTensor, Megatron Core.

May import everything below the trainer. No framework but torch is imported until an object of it is met. Start
reading at `capture.capture`; `placement` says where a local tensor lies in its logical one.
"""

from ckpt.adapters.capture import Known, capture
from ckpt.adapters.known import known_from

__all__ = ["Known", "capture", "known_from"]
