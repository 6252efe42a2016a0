"""How fast weights are converted on their way into a GPU's memory, by whom, and what that takes of the memory.

The checkpoint is a Llama's of zeros in bfloat16, sparse on disk: reading it costs little, so that what is seen is the
conversion, its copies and the digests.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from preload.engine.client.control import make_selector
from preload.engine.recipe import Recipe

from .processes import PrivateDaemon, tell, wait_until

RECIPES = ("keep", "fp8_per_tensor", "fp8_per_block", "mxfp4", "nvfp4", "int8_per_channel", "int4_group32")


def write_llama(folder: Path, num_bytes: int) -> Path:
    """A checkpoint of about so many bytes: layers of a model 4096 wide, or of a small one where that is too much."""
    from preload.engine.models.configs import spec_from_config
    from preload.engine.models.llama_names import expected_tensors

    hidden = 4096 if num_bytes >= 1 << 30 else 256
    layer_bytes = 2 * (hidden * hidden * 5 // 2 + 3 * hidden * hidden * 7 // 2)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": hidden * 7 // 2,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256, "vocab_size": 1024,
        "num_hidden_layers": max(1, num_bytes // layer_bytes), "max_position_embeddings": 4096,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, tensor in expected_tensors(spec_from_config(config, "config.json")).items():
        size = 2
        for extent in tensor.shape:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
    return folder


def run(device: str, num_bytes: int) -> list[dict[str, Any]]:
    """A row for each recipe: seconds, GB/s of stored bytes, and what the loader said of who converted."""
    rows = []
    with PrivateDaemon("--device-limit", "95%") as daemon:
        path = write_llama(daemon.folder / "llama", num_bytes)
        stored = (path / "model.safetensors").stat().st_size
        log = daemon.folder / "daemon.log"
        for name in RECIPES:
            tell(f"conversion to {name}")
            seen = log.stat().st_size
            start_s = time.perf_counter()
            with daemon.control() as control:
                *_, last = control.load(str(path), Recipe(quantization=name), device=device)
                seconds = time.perf_counter() - start_s
                control.evict(make_selector(generation_id=last.loaded.id))
            wait_until(lambda: not _generations(daemon), "the memory to be free again", 30)
            said = log.read_bytes()[seen:].decode(errors="replace").splitlines()
            words = [line.partition("onver")[2] for line in said if "converted" in line or "conversion took" in line]
            rows.append(
                {
                    "recipe": name,
                    "s": round(seconds, 3),
                    "stored_gb_per_s": round(stored / seconds / 1e9, 2),
                    "said": "; ".join(f"conver{word}" for word in words),
                }
            )
    return rows


def _generations(daemon: PrivateDaemon) -> list[Any]:
    with daemon.control() as control:
        return list(control.list().generations)
