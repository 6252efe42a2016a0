"""The real model in this process: mapped from a daemon's memory, with the kernels that a core would choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preload.engine.client import attach
from preload.engine.client.attach import Attachment
from preload.engine.recipe import Recipe

from .processes import PrivateDaemon

if TYPE_CHECKING:
    from preload.engine.layers.ops import Ops
    from preload.engine.models.decoder import Decoder


def attached(daemon: PrivateDaemon, checkpoint: str, quantization: str, compute_dtype: str) -> Attachment:
    """The weights, loaded if they are not resident."""
    recipe = Recipe(quantization=quantization, compute_dtype=compute_dtype)
    with daemon.control() as control:
        for _ in control.load(checkpoint, recipe):
            pass
    return attach(checkpoint, recipe=recipe, runtime_dir=daemon.runtime_dir)


def chosen_ops(daemon: PrivateDaemon, compute_dtype: str, num_threads: int, matmul_precision: str = "highest") -> Ops:
    import torch

    from preload.engine.core.kernels import choose_ops

    return choose_ops(daemon.runtime_dir, getattr(torch, compute_dtype), num_threads, matmul_precision)


def make_decoder(attachment: Attachment, ops: Ops | None) -> Decoder:
    """`ops` None is plain torch."""
    import torch

    from preload.engine.models.decoder import Decoder
    from preload.engine.models.spec import ModelSpec

    found = attachment.resolved_recipe
    dtype = getattr(torch, found["compute_dtype"])
    return Decoder(ModelSpec.from_dict(found["spec"]), attachment.tensors, attachment.layouts, dtype, ops)
