"""Device memory as DLPack capsules: for every dtype that resident tensors have, without a copy.

A capsule carries one DLManagedTensor (DLPack 1.0, the unversioned structure, which every consumer takes). It keeps
its owner alive until the consumer calls the deleter, or until the capsule goes unused. Source: the header
dlpack/dlpack.h.
"""

from __future__ import annotations

import ctypes
from typing import Any

CPU, CUDA = 1, 2
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_E4M3FN, _E5M2, _E8M0FNU, _E2M1FN = 10, 12, 14, 17

TYPES = {
    "bool": (_BOOL, 8, 1),
    "uint8": (_UINT, 8, 1), "uint16": (_UINT, 16, 1), "uint32": (_UINT, 32, 1), "uint64": (_UINT, 64, 1),
    "int8": (_INT, 8, 1), "int16": (_INT, 16, 1), "int32": (_INT, 32, 1), "int64": (_INT, 64, 1),
    "float16": (_FLOAT, 16, 1), "float32": (_FLOAT, 32, 1), "float64": (_FLOAT, 64, 1), "bfloat16": (_BFLOAT, 16, 1),
    "complex64": (_COMPLEX, 64, 1),
    "float8_e4m3fn": (_E4M3FN, 8, 1), "float8_e5m2": (_E5M2, 8, 1), "float8_e8m0fnu": (_E8M0FNU, 8, 1),
    "float4_e2m1fn_x2": (_E2M1FN, 4, 2),
}  # fmt: skip
"""(code, bits, lanes) of every dtype a manifest may name: two 4-bit values are two lanes of one element."""


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_alive: dict[int, Any] = {}
"""What each managed tensor that somebody may look at needs, by its address."""

_NAME = b"dltensor"
_python = ctypes.pythonapi
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_python.PyCapsule_IsValid.restype = ctypes.c_int
_python.PyCapsule_IsValid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)


def _delete(managed: int) -> None:
    _alive.pop(managed, None)


def _discard(capsule: int) -> None:
    """A capsule goes. One that was consumed has another name, and its consumer calls the deleter."""
    if _python.PyCapsule_IsValid(capsule, _NAME):
        _alive.pop(_python.PyCapsule_GetPointer(capsule, _NAME), None)


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_deleter, _destructor = _Callback(_delete), _Callback(_discard)


def make_capsule(address: int, dtype: str, shape: tuple[int, ...], device: tuple[int, int], owner: object) -> Any:
    """A contiguous tensor at an address of a DLPack device (type, index); `owner` lives as long as it does."""
    extents = (ctypes.c_int64 * len(shape))(*shape)
    managed = _Managed(
        _Tensor(address or None, _Device(*device), len(shape), _DataType(*TYPES[dtype]), extents, None, 0),
        None,
        ctypes.cast(_deleter, ctypes.c_void_p),
    )
    where = ctypes.addressof(managed)
    _alive[where] = (managed, extents, owner)
    return _python.PyCapsule_New(where, _NAME, ctypes.cast(_destructor, ctypes.c_void_p))
