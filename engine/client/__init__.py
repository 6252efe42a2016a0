"""Attach to resident weights; usable alone by any engine.

    from preload.engine.client import attach

    with attach("/models/smollm2.gguf") as attachment:
        for name, tensor in attachment.tensors.items():
            print(name, tensor.dtype, tuple(tensor.shape))

`attach` maps what the daemon keeps resident, read-only and without a copy; `Control` speaks the daemon's other rpcs.
"""

from .attach import Attachment, attach
from .control import Control
from .lease import Lease, LeaseEvent

__all__ = ["Attachment", "Control", "Lease", "LeaseEvent", "attach"]
