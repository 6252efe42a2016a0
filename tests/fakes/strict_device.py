"""A "cuda:0" for a build of torch without CUDA, computed by the host: tensors on it are as strict as on a GPU.

Whatever mixes tensors of the device and of the host raises, as torch does on a GPU: only copies, indices and numbers
without dimensions may come from elsewhere. What is moved is copied. So code that is to run on a GPU shows on any
machine where it forgets to move something, or reads on the host what is not there. Nothing is said of streams,
pinned memory or kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda:0")

_FROM_ANYWHERE = ("aten::copy_", "aten::index", "aten::index_put_", "aten::_index_put_impl_")


class DeviceTensor(torch.Tensor):
    """Says that it is on DEVICE; its numbers are in `inner`, on the host. Below Python it is one of torch's tensors
    without numbers, since nothing there could be done with a device that is not linked."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta",
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a tensor of a device to numpy; use Tensor.cpu() first")


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def strict_device() -> Iterator[torch.device]:
    """While it is open, this thread has the device. Only for builds without CUDA; all is in inference mode, and
    `torch.tensor` has to be followed by a copy."""
    assert not torch.backends.cuda.is_built()
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), _Mode():
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        yield DEVICE


@pytest.fixture
def gpu_of_the_host() -> Iterator[torch.device]:
    with strict_device() as device:
        yield device


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat = tree_flatten((args, kwargs))[0]
    theirs = [x for x in flat if isinstance(x, DeviceTensor)]
    ours = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor)]
    if any(x.is_meta for x in ours):
        raise RuntimeError(f"{func}: torch has made a tensor of a list by itself; write torch.tensor")
    asked = [x.type != "cpu" for x in flat if isinstance(x, torch.device)]
    if not asked and theirs and any(x.dim() for x in ours) and func._schema.name not in _FROM_ANYWHERE:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {DEVICE} and cpu")
    to_device = asked[0] if asked else bool(theirs)
    if func._schema.name == "aten::copy_":
        to_device = isinstance(args[0], DeviceTensor)
    plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
    if func._schema.name in ("aten::pin_memory", "aten::_pin_memory"):
        return args[0].clone()
    out = func(*plain_args, **plain_kwargs)
    wrappers = {id(x.inner): x for x in theirs}
    known = {id(x) for x in ours} | set(wrappers)
    moves = bool(asked) and bool(ours if to_device else theirs)

    def place(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if moves and id(x) in known:
            x = x.clone()
        if not to_device:
            return x
        return wrappers[id(x)] if id(x) in wrappers else DeviceTensor(x)

    return tree_map(place, out)


def _plain(x: Any) -> Any:
    if isinstance(x, DeviceTensor):
        return x.inner
    return torch.device("cpu") if isinstance(x, torch.device) else x
