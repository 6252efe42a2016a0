"""Receipts: proof of which files were read, in which state.

A receipt's stat was taken from the descriptor before the first byte was read. It is handed out only after the path
has been looked at again and found to lead to the same, unchanged file.

A checkpoint that was named by its folder has a receipt for the folder too, over the names that decide which files are
read: a file that comes or goes may change what the folder means. One that was named by its file needs none: which
files are read follows from its path alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3

from preload.protos import loader_pb2, weight_cache_pb2

from .checkpoint import Checkpoint, layout_names
from .digests import document_digests, weights_file_digest
from .files import CheckpointFile, CheckpointFolder


def make_receipts(checkpoint: Checkpoint, digests: Mapping[str, bytes] | None) -> loader_pb2.Receipts:
    """One receipt per file, and the folder's, by path. `digests`: of every tensor's stored bytes, by stored name;
    None if they were not read, and the receipts of weights are without content digest then.

    Raises CheckpointChangedError if a file or the folder is not what it was when it was opened.
    """
    contents = document_digests(checkpoint)
    for weights in checkpoint.weights:
        contents[weights.file.path] = weights_file_digest(weights, digests) if digests is not None else b""
    sources: list[CheckpointFile | CheckpointFolder] = [*checkpoint.files]
    if checkpoint.folder is not None:
        names = "".join(f"{name}\n" for name in layout_names(checkpoint.folder))
        contents[checkpoint.folder.path] = blake3(names.encode()).digest()
        sources.append(checkpoint.folder)
    receipts = loader_pb2.Receipts()
    for source in sorted(sources, key=lambda source: source.path):
        source.check_unchanged()
        receipts.receipts.append(_receipt(source, contents[source.path]))
    return receipts


def _receipt(source: CheckpointFile | CheckpointFolder, content_digest: bytes) -> weight_cache_pb2.Receipt:
    return weight_cache_pb2.Receipt(
        path=source.path,
        device=source.stat.device,
        inode=source.stat.inode,
        size_bytes=source.stat.size_bytes,
        mtime_ns=source.stat.mtime_ns,
        ctime_ns=source.stat.ctime_ns,
        content_digest=content_digest,
        stat_blind=isinstance(source, CheckpointFile) and source.is_stat_blind,
    )
