"""Arrays over memory of a device, as other libraries take them: every dtype, the same bytes, no copy."""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from preload.engine.client.binding import ITEM_BYTES, bind
from preload.engine.cuda import dlpack
from preload.engine.cuda.views import DeviceArray
from preload.protos import weight_cache_pb2 as pb

NUM_BYTES = 96


class Segments:
    """Memory at addresses that the host sees as well, as an emulated device has."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(bytes(range(1, NUM_BYTES + 1)), NUM_BYTES)
        self.addresses = [ctypes.addressof(self.buffer)]
        self.sizes = [NUM_BYTES]
        self.device: Any = SimpleNamespace(is_emulated=True, index=0, name="cuda:GPU-of-a-test")


@pytest.fixture
def segments() -> Segments:
    return Segments()


@pytest.fixture(params=sorted(ITEM_BYTES))
def array(request: pytest.FixtureRequest, segments: Segments) -> Any:
    """A tensor of 2 rows at byte 8 of the segment, bound as a client binds it."""
    dtype = request.param
    shape = (2, 16 // ITEM_BYTES[dtype])
    tensor = pb.Tensor(name="t", dtype=dtype, shape=shape, offset=8, num_bytes=32)
    return bind(pb.Manifest(tensors=[tensor]), segments, "device")["t"]  # type: ignore[arg-type]


def test_every_dtype_of_a_manifest_has_a_code(array: DeviceArray) -> None:
    assert array.dtype in dlpack.TYPES
    _, bits, lanes = dlpack.TYPES[array.dtype]
    assert bits * lanes == 8 * ITEM_BYTES[array.dtype]


def test_dlpack_gives_torch_the_dtype_and_the_memory_itself(array: DeviceArray, segments: Segments) -> None:
    wanted = getattr(torch, array.dtype)
    tensor = torch.from_dlpack(array)
    assert (tensor.dtype, tuple(tensor.shape)) == (wanted, array.shape)
    assert tensor.data_ptr() == segments.addresses[0] + 8
    assert bytes(tensor.view(torch.uint8).reshape(-1).tolist()) == segments.buffer.raw[8:40]


def test_the_cuda_array_interface_names_the_same_bytes(array: DeviceArray, segments: Segments) -> None:
    interface = array.__cuda_array_interface__
    assert interface["data"] == (segments.addresses[0] + 8, False)
    assert interface["shape"] == array.shape
    assert int(interface["typestr"][2:]) == ITEM_BYTES[array.dtype]
    assert interface["strides"] is None


def test_a_capsule_keeps_the_segments_until_its_consumer_lets_go(segments: Segments) -> None:
    array = DeviceArray(segments.addresses[0], "float8_e4m3fn", (4,), 4, 1, segments)  # type: ignore[arg-type]
    gone = weakref.ref(segments)
    tensor = torch.from_dlpack(array)
    del array, segments
    gc.collect()
    assert gone() is not None
    assert tensor.view(torch.uint8).tolist() == [1, 2, 3, 4]
    del tensor
    gc.collect()
    assert not dlpack._alive


def test_a_capsule_that_nobody_takes_keeps_nothing(segments: Segments) -> None:
    array = DeviceArray(segments.addresses[0], "bfloat16", (4,), 8, 2, segments)  # type: ignore[arg-type]
    capsule = array.__dlpack__()
    assert len(dlpack._alive) == 1
    del capsule
    assert not dlpack._alive


def test_a_copy_or_another_device_is_refused_and_a_real_device_is_named(segments: Segments) -> None:
    array = DeviceArray(segments.addresses[0], "int8", (4,), 4, 1, segments)  # type: ignore[arg-type]
    with pytest.raises(BufferError, match="without a copy"):
        array.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        array.__dlpack__(dl_device=(dlpack.CUDA, 0))
    segments.device = SimpleNamespace(is_emulated=False, index=3, name="cuda:GPU-of-a-test")
    assert array.__dlpack_device__() == (dlpack.CUDA, 3)
