"""A checkpoint's digest follows its content and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from preload.engine.loading.digests import checkpoint_digest, outline
from preload.engine.loading.files import CheckpointFile, TensorInfo

FILE = cast(CheckpointFile, None)


def tensor(name: str, dtype: str = "float32", shape: tuple[int, ...] = (2,)) -> TensorInfo:
    return TensorInfo(name, dtype, shape, FILE, 0, 8)


@given(st.dictionaries(st.text(max_size=8), st.binary(max_size=8), min_size=1, max_size=8), st.randoms())
def test_order_and_place_of_tensors_do_not_matter(content: dict[str, bytes], rng: random.Random) -> None:
    digests = {name: blake3(data).digest() for name, data in content.items()}
    tensors = [tensor(name) for name in content]
    moved = [replace(item, offset=rng.randrange(1000)) for item in tensors]
    rng.shuffle(moved)
    assert checkpoint_digest(tensors, digests) == checkpoint_digest(moved, digests)


@pytest.mark.parametrize("change", [{"name": "b"}, {"dtype": "int32"}, {"shape": (1, 2)}, {"shape": ()}])
def test_name_dtype_and_shape_matter(change: dict[str, Any]) -> None:
    digests = {"a": bytes(32), "b": bytes(32)}
    assert checkpoint_digest([tensor("a")], digests) != checkpoint_digest([replace(tensor("a"), **change)], digests)


def test_an_outline_follows_names_dtypes_shapes_and_recipe_and_not_order() -> None:
    tensors = [tensor("a"), tensor("b")]
    same = outline(tensors, "{}")
    assert outline(tensors[::-1], "{}") == same
    assert outline([replace(item, offset=7) for item in tensors], "{}") == same
    others = [outline(tensors[:1], "{}"), outline(tensors, '{"model":"raw"}')]
    others += [
        outline([tensor("a"), replace(tensor("b"), **change)], "{}")
        for change in ({"name": "c"}, {"dtype": "int32"}, {"shape": (1, 2)})
    ]
    assert len({same, *others}) == 6


def test_bytes_matter() -> None:
    assert checkpoint_digest([tensor("a")], {"a": bytes(32)}) != checkpoint_digest([tensor("a")], {"a": b"\1" * 32})
