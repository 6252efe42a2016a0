"""Receipts: proof of which files were read, in which state.

A receipt's stat was taken from the descriptor before the first byte was read. It is handed out only after the path
has been looked at again and found to lead to the same, unchanged file.
"""

from __future__ import annotations

from collections.abc import Mapping

from preload.protos import loader_pb2, weight_cache_pb2

from .checkpoint import Checkpoint
from .digests import document_digests, weights_file_digest
from .files import CheckpointFile


def make_receipts(checkpoint: Checkpoint, digests: Mapping[str, bytes]) -> loader_pb2.Receipts:
    """One receipt per file, by path. `digests`: of every tensor's stored bytes, by stored name.

    Raises CheckpointChangedError if a file is not what it was when it was opened.
    """
    contents = document_digests(checkpoint)
    for weights in checkpoint.weights:
        contents[weights.file.path] = weights_file_digest(weights, digests)
    receipts = loader_pb2.Receipts()
    for file in sorted(checkpoint.files, key=lambda file: file.path):
        file.check_unchanged()
        receipts.receipts.append(_receipt(file, contents[file.path]))
    return receipts


def _receipt(file: CheckpointFile, content_digest: bytes) -> weight_cache_pb2.Receipt:
    return weight_cache_pb2.Receipt(
        path=file.path,
        device=file.stat.device,
        inode=file.stat.inode,
        size_bytes=file.stat.size_bytes,
        mtime_ns=file.stat.mtime_ns,
        ctime_ns=file.stat.ctime_ns,
        content_digest=content_digest,
    )
