"""A checkpoint: the files behind a path, and the tensors in them, before any weight is read.

Accepted: a .safetensors or .gguf file; a folder with `model.safetensors`, with `model.safetensors.index.json` and
its shards, with any other .safetensors files, or else with exactly one .gguf. Symbolic links are followed, as the
Hugging Face cache needs it. Pickle formats are refused, by name and by content: unpickling runs code.

Owns format detection, the index, and the invariant that tensor names are unique over all files. It does not
know what a model expects; that is `resolve.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from preload.engine.errors import CheckpointError, CheckpointNotFoundError

from . import gguf_reader, safetensors_reader
from .files import MAX_HEADER_BYTES, REPLACE, CheckpointFile, CheckpointFolder, TensorInfo, fault
from .strict_json import read_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_LAYOUT_SUFFIXES = (".safetensors", ".gguf", *PICKLE_SUFFIXES)
_LFS_MAGIC = b"version https://git-lfs"


@dataclass
class WeightsFile:
    """A file with tensors: they are in file order, and the header is everything before `data_start`."""

    file: CheckpointFile
    tensors: list[TensorInfo]
    data_start: int


@dataclass
class Checkpoint:
    """Everything known of a checkpoint from its headers. Closing it closes its files."""

    path: str
    format: str  # "safetensors" or "gguf"
    weights: list[WeightsFile] = field(default_factory=list)
    documents: list[tuple[CheckpointFile, bytes]] = field(default_factory=list)  # index, configuration
    folder: CheckpointFolder | None = None  # if the path leads to one
    config: dict[str, Any] | None = None  # of safetensors
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of GGUF

    @property
    def tensors(self) -> list[TensorInfo]:
        """All tensors, file by file, in file order."""
        return [tensor for weights in self.weights for tensor in weights.tensors]

    @property
    def files(self) -> list[CheckpointFile]:
        return [weights.file for weights in self.weights] + [file for file, _ in self.documents]

    @property
    def config_path(self) -> str:
        """Where the configuration comes from, for messages."""
        if self.format == "gguf":
            return self.weights[0].file.path
        folder = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        return os.path.join(folder, CONFIG_NAME)

    def close(self) -> None:
        for file in self.files:
            file.close()


def open_checkpoint(path: str, *, with_config: bool = True) -> Checkpoint:
    """Reads all headers. Raises CheckpointError, or CheckpointNotFoundError for what is missing or unreadable.

    `with_config=False` leaves config.json unread, for weights that are wanted as they are.
    """
    path = os.path.abspath(path)
    folder = CheckpointFolder(path) if os.path.isdir(path) else None
    checkpoint = _open_file(path) if folder is None else _open_folder(path, layout_names(folder))
    checkpoint.folder = folder
    if with_config and checkpoint.format == "safetensors":
        checkpoint.config = _read_config(checkpoint)
    if not checkpoint.tensors:
        raise fault(checkpoint.path, "holds no tensors; check the path")
    return checkpoint


def _open_file(path: str) -> Checkpoint:
    """A path that leads to one file: its content decides, whatever its name."""
    _refuse_pickle_name(path)
    file = CheckpointFile(path)
    head = file.read(0, min(32, file.size_bytes))
    if head.startswith(gguf_reader.MAGIC):
        return _open_gguf(path, file)
    _refuse_foreign_content(file, head)
    if path.endswith(".gguf"):
        raise fault(path, f"is not a GGUF file: it starts with {head[:4]!r}; {REPLACE}")
    if path.endswith(".json"):
        raise fault(path, "is not a file of weights; name its folder")
    if _is_text(head) or not (path.endswith(".safetensors") or head[8:9] == b"{"):
        raise fault(path, f"is neither safetensors nor GGUF: it starts with {head[:8]!r}; {REPLACE}")
    file.close()
    return _open_safetensors(path, [path])


def _is_text(head: bytes) -> bool:
    """A file of weights begins with a length, of which most bytes are 0."""
    return len(head) > 8 and all(byte >= 0x20 or byte in b"\t\n\r" for byte in head)


def layout_names(folder: CheckpointFolder) -> list[str]:
    """The names that decide what the folder is a checkpoint of, sorted. Raises CheckpointError for one that cannot be
    written down."""
    names = [n for n in folder.names if n.endswith(_LAYOUT_SUFFIXES) or n in (INDEX_NAME, CONFIG_NAME)]
    for name in names:
        if not _is_unicode(name):
            raise fault(folder.path, f"holds the file {name!r}, whose name is not UTF-8; rename it")
    return names


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _open_folder(path: str, names: list[str]) -> Checkpoint:
    if SINGLE_NAME in names:
        return _open_safetensors(path, [os.path.join(path, SINGLE_NAME)])
    if INDEX_NAME in names:
        return _open_sharded(path)
    return _open_unnamed(path, names)


def _open_unnamed(path: str, names: list[str]) -> Checkpoint:
    """A folder without a file of the usual name."""
    safetensors = [name for name in names if name.endswith(".safetensors")]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if safetensors:
        return _open_safetensors(path, [os.path.join(path, name) for name in safetensors])
    if len(ggufs) == 1:
        return _open_file(os.path.join(path, ggufs[0]))
    if ggufs:
        raise CheckpointError(f"{path} holds {len(ggufs)} GGUF files ({', '.join(ggufs[:5])}); name one of them",
                              {"file": path})  # fmt: skip
    for name in names:
        _refuse_pickle_name(os.path.join(path, name))
    raise CheckpointNotFoundError(f"{path} holds no .safetensors and no .gguf file; check the path", {"file": path})


def _open_safetensors(path: str, file_paths: list[str]) -> Checkpoint:
    checkpoint = Checkpoint(path, "safetensors")
    for file_path in file_paths:
        file = CheckpointFile(file_path)
        _refuse_foreign_content(file, file.read(0, min(32, file.size_bytes)))
        tensors, data_start = safetensors_reader.read_header(file)
        checkpoint.weights.append(WeightsFile(file, tensors, data_start))
    _check_unique(checkpoint)
    return checkpoint


def _open_sharded(path: str) -> Checkpoint:
    """A folder with an index: index and shards must tell the same story."""
    index_path = os.path.join(path, INDEX_NAME)
    index_file = CheckpointFile(index_path)
    _refuse_foreign_content(index_file, index_file.read(0, min(32, index_file.size_bytes)))
    index, data = read_object(index_file, "index", MAX_HEADER_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fault(index_path, f"has no weight_map object; {REPLACE}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or os.path.basename(shard) != shard:
            raise fault(index_path, f"is mapped to {shard!r}, which is no .safetensors file name; {REPLACE}", name)
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not os.path.lexists(os.path.join(path, shard)):
            raise CheckpointNotFoundError(
                f"{os.path.join(path, shard)} is missing, though {INDEX_NAME} names it; fetch the shard",
                {"file": os.path.join(path, shard)},
            )
    checkpoint = _open_safetensors(path, [os.path.join(path, shard) for shard in shards])
    checkpoint.documents.append((index_file, data))
    _check_index(checkpoint, weight_map)
    return checkpoint


def _check_index(checkpoint: Checkpoint, weight_map: dict[str, str]) -> None:
    found: set[str] = set()
    for weights in checkpoint.weights:
        shard = os.path.basename(weights.file.path)
        for tensor in weights.tensors:
            if tensor.name not in weight_map:
                raise fault(weights.file.path, f"is not named by {INDEX_NAME}; fetch index and shard again",
                            tensor.name)  # fmt: skip
            if weight_map[tensor.name] != shard:
                raise fault(
                    weights.file.path,
                    f"belongs to {weight_map[tensor.name]} by {INDEX_NAME}; fetch index and shards again",
                    tensor.name,
                )
            found.add(tensor.name)
    for name, shard in weight_map.items():
        if name not in found:
            shard_path = os.path.join(checkpoint.path, shard)
            raise fault(shard_path, f"is missing, though {INDEX_NAME} names it here; fetch the shard again", name)


def _check_unique(checkpoint: Checkpoint) -> None:
    seen: dict[str, str] = {}
    for tensor in checkpoint.tensors:
        if tensor.name in seen:
            raise fault(
                tensor.file.path, f"is also in {seen[tensor.name]}; remove the file that is too much", tensor.name
            )
        seen[tensor.name] = tensor.file.path


def _open_gguf(path: str, file: CheckpointFile) -> Checkpoint:
    header = gguf_reader.read_header(file)
    num_splits = header.metadata.get("split.count", 1)
    if isinstance(num_splits, int) and num_splits > 1:
        raise fault(path, f"is one of {num_splits} parts of a split GGUF; join them with gguf-split --merge")
    weights = [WeightsFile(file, header.tensors, header.data_start)]
    return Checkpoint(path, "gguf", weights, metadata=header.metadata)


def _read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.config_path
    if not os.path.lexists(path):
        raise CheckpointNotFoundError(
            f"{path} does not exist; put the model's {CONFIG_NAME} beside its weights, or load with model 'raw'",
            {"file": path},
        )
    file = CheckpointFile(path)
    _refuse_foreign_content(file, file.read(0, min(32, file.size_bytes)))
    config, data = read_object(file, "configuration", 10_000_000)
    checkpoint.documents.append((file, data))
    return config


def _refuse_pickle_name(path: str) -> None:
    if path.endswith(PICKLE_SUFFIXES):
        raise _pickle(path, "by its name")


def _refuse_foreign_content(file: CheckpointFile, head: bytes) -> None:
    """What is found where weights should be: a git-lfs pointer, or a pickle under another name."""
    if head.startswith(_LFS_MAGIC):
        raise fault(file.path, "is a git-lfs pointer, not the file itself; fetch it with: git lfs pull")
    if head[4:9] == b"\0\0\0\0{":
        return  # a safetensors header, whose length happens to spell another magic
    for is_pickle in _PICKLE_MAGIC:
        if is_pickle(head):
            raise _pickle(file.path, "by its content")


_PICKLE_MAGIC: tuple[Callable[[bytes], bool], ...] = (
    lambda head: head.startswith(b"PK\x03\x04"),  # torch.save since 1.6: a zip
    lambda head: len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5,  # a bare pickle, protocol 2 to 5
)


def _pickle(path: str, how: str) -> CheckpointError:
    return fault(
        path, f"is a pickle checkpoint {how}; pickle can run code, so it is refused: convert it to safetensors"
    )
