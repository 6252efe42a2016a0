"""Finding a checkpoint's tokenizer: a GGUF file carries its own, a folder has tokenizer.json.

A file is what its content says, whatever its name, as the loader sees it too."""

from __future__ import annotations

from pathlib import Path

from preload.engine.errors import CheckpointError

from .errors import StartError
from .tokenizer import Tokenizer

_MAGIC = b"GGUF"


def load_tokenizer(checkpoint: str, override: str = "") -> Tokenizer:
    """The tokenizer of `override` if there is one, else of `checkpoint`. Raises StartError naming the file."""
    path = Path(override or checkpoint)
    if not path.exists():
        what = "the tokenizer" if override else "the checkpoint"
        raise StartError(f"{what} {path} does not exist")
    try:
        gguf = _gguf_file(path)
    except OSError as error:
        raise StartError(f"the tokenizer of {path} cannot be read: {error.strerror}") from error
    if gguf is not None:
        return _load_gguf(gguf)
    from .hf_tokenizer import hf_tokenizer

    if path.is_dir():
        return hf_tokenizer(path / "tokenizer.json")
    return hf_tokenizer(path if path.suffix == ".json" else path.with_name("tokenizer.json"))


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that the path leads to: told by its content, so that any name will do. In a folder, safetensors
    go before it."""
    if path.is_file():
        with path.open("rb") as file:
            return path if file.read(len(_MAGIC)) == _MAGIC or path.suffix == ".gguf" else None
    if path.is_dir() and not (path / "tokenizer.json").exists() and not any(path.glob("*.safetensors")):
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
    return None


def _load_gguf(path: Path) -> Tokenizer:
    from preload.engine.loading.gguf_reader import read_metadata

    from .gguf_tokenizer import gguf_tokenizer

    try:
        metadata = read_metadata(str(path))
    except CheckpointError as error:
        raise StartError(error.message) from error
    return gguf_tokenizer(metadata, path=str(path))
