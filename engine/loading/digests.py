"""Digests that make an identity: of a checkpoint's content, and of one file's.

Everything is BLAKE3. The checkpoint digest covers name, dtype, shape and bytes of every stored tensor and nothing
else: not the sharding, not the order in files, not paths, not the headers' other content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from blake3 import blake3

from preload.engine.recipe import canonical_json

from .checkpoint import Checkpoint, WeightsFile
from .files import TensorInfo

_CHECKPOINT_DOMAIN = b"preload checkpoint 1\n"
_FILE_DOMAIN = b"preload file 1\n"
_OUTLINE_DOMAIN = b"preload outline 1\n"


def checkpoint_digest(tensors: Iterable[TensorInfo], digests: Mapping[str, bytes]) -> str:
    """Hexadecimal digest of the content. `digests`: BLAKE3 of each tensor's stored bytes, by name."""
    hasher = blake3(_CHECKPOINT_DOMAIN)
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        line = [tensor.name, tensor.dtype, list(tensor.shape), digests[tensor.name].hex()]
        hasher.update(canonical_json(line).encode() + b"\n")
    return hasher.hexdigest()


def outline(tensors: Iterable[TensorInfo], resolved_recipe: str) -> bytes:
    """Digest of all that the headers tell: name, dtype and shape of every stored tensor, and what the recipe makes of
    them. Checkpoints whose outlines differ cannot be the same generation; of equal ones, the bytes decide."""
    hasher = blake3(_OUTLINE_DOMAIN)
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        hasher.update(canonical_json([tensor.name, tensor.dtype, list(tensor.shape)]).encode() + b"\n")
    hasher.update(resolved_recipe.encode())
    return hasher.digest()


def weights_file_digest(weights: WeightsFile, digests: Mapping[str, bytes]) -> bytes:
    """Digest of a file of weights: its header's digest, then those of its tensors in file order."""
    hasher = blake3(_FILE_DOMAIN)
    hasher.update(blake3(weights.file.read(0, weights.data_start)).digest())
    for tensor in weights.tensors:
        hasher.update(digests[tensor.name])
    return hasher.digest()


def document_digests(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Digests of index and configuration, which were read whole, by path."""
    return {file.path: blake3(data).digest() for file, data in checkpoint.documents}
