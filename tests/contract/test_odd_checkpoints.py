"""Checkpoints that are odd and legal, and files that this user may not read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preload.engine.client import attach
from preload.engine.errors import CheckpointNotFoundError
from preload.engine.recipe import Recipe

LM_HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def daemon(make_shared_daemon: Callable[..., Any]) -> Any:
    return make_shared_daemon()


@pytest.mark.parametrize("kind", ["folder", "weights", "config"])
def test_a_file_without_permission_is_refused_by_name(
    make_daemon: Callable[..., Any], gate: Any, files: Any, kind: str, raw_checkpoint: Path,
    check_refusal: Callable[..., None],
) -> None:  # fmt: skip
    """Root reads everything: its loader is started without the capabilities that let it."""
    command = gate.command()
    if os.geteuid() == 0:
        settings = json.loads(command[-1])
        drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
        command[-1] = json.dumps({"loader_command": drop + settings["loader_command"]})
    daemon = make_daemon(command=command)
    folder = files.model()
    denied = {"folder": folder, "weights": files.weights, "config": folder / "config.json"}[kind]
    denied.chmod(0)
    try:
        words = (str(denied), "permission denied")
        check_refusal(daemon, folder, CheckpointNotFoundError, words, raw_checkpoint, model="auto")
    finally:
        denied.chmod(0o700)
    assert daemon.load(folder).id


def test_empty_and_0_dimensional_tensors_are_legal(
    daemon: Any, tmp_path: Path, write_safetensors: Callable[..., Path]
) -> None:
    path = write_safetensors(
        tmp_path / "odd.safetensors",
        {
            "first": ("F32", [0], b""),
            "scalar": ("F32", [], bytes.fromhex("0000c03f")),
            "empty": ("F16", [3, 0, 2], b""),
            "after": ("U8", [3], b"abc"),
            "last": ("I64", [0], b""),
        },
    )
    daemon.load(path, model="raw")
    for kind in ("numpy", "torch"):
        with attach(path, recipe=Recipe(model="raw"), runtime_dir=str(daemon.runtime_dir), tensors=kind) as found:
            shapes = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
            assert shapes == {"first": (0,), "scalar": (), "empty": (3, 0, 2), "after": (3,), "last": (0,)}
            assert float(found.tensors["scalar"]) == 1.5
            assert bytes(found.tensors["after"].tolist()) == b"abc"


def test_a_checkpoint_of_nothing_but_empty_tensors_is_legal(
    daemon: Any, tmp_path: Path, write_safetensors: Callable[..., Path]
) -> None:
    path = write_safetensors(tmp_path / "nothing.safetensors", {"a": ("F32", [0, 4], b"")})
    daemon.load(path, model="raw")
    with attach(path, recipe=Recipe(model="raw"), runtime_dir=str(daemon.runtime_dir), tensors="numpy") as found:
        assert found.tensors["a"].shape == (0, 4)


@pytest.mark.parametrize("is_stored", [False, True], ids=["not stored", "stored"])
@pytest.mark.parametrize("quantization", ["keep", "int8_per_channel"])
def test_tied_weights_share_memory_whether_stored_or_not(
    daemon: Any, files: Any, quantization: str, is_stored: bool
) -> None:
    def tie(tensors: dict[str, Any]) -> None:
        del tensors[LM_HEAD]
        if is_stored:
            tensors[LM_HEAD] = tensors["model.embed_tokens.weight"]

    folder = files.model(tie, tie_word_embeddings=True)
    daemon.load(folder, quantization=quantization)
    recipe = Recipe(quantization=quantization)
    with attach(folder, recipe=recipe, runtime_dir=str(daemon.runtime_dir), tensors="numpy") as found:
        for suffix in ("", "_scale") if quantization == "int8_per_channel" else ("",):
            output, embedding = (found.tensors[name + suffix] for name in (LM_HEAD, "model.embed_tokens.weight"))
            assert output.ctypes.data == embedding.ctypes.data
            assert output.shape == embedding.shape
