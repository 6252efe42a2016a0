"""What each recipe costs in quality: perplexity on the shipped prose, and the error of its last logits.

The measure is float32: weights dequantized, computed by plain torch. Every recipe is loaded by the daemon's own
loader and computed from the mapped weights, with the kernels that a core would choose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from preload.engine.frontend.tokenizer_files import load_tokenizer
from preload.engine.recipe import QUANTIZATIONS

from .peers.prompts import PROSE
from .processes import BenchError, PrivateDaemon, tell
from .resident_model import attached, chosen_ops, make_decoder
from .statistics import machine

if TYPE_CHECKING:
    from torch import Tensor

    from preload.engine.models.decoder import Decoder

NUM_TOKENS = 4096
_CHUNK = 512
_BLOCK_SIZE = 16


class Setting(NamedTuple):
    """A recipe, and how precisely a core multiplies it."""

    quantization: str
    compute_dtype: str = "float32"
    matmul_precision: str = "highest"


SETTINGS = (
    *(Setting(name) for name in QUANTIZATIONS),
    Setting("keep", matmul_precision="medium"),
    Setting("keep", "bfloat16"),
    Setting("bf16", "bfloat16"),
)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """`relative_error`: of the logits after the last token, by norm, against float32's."""

    quantization: str
    compute_dtype: str
    matmul_precision: str
    kernels: str
    resident_bytes: int
    perplexity: float
    relative_error: float


def run(
    checkpoint: str,
    num_tokens: int = NUM_TOKENS,
    num_threads: int = 2,
    chosen: Sequence[Setting] = SETTINGS,
) -> dict[str, Any]:
    """`float32_perplexity`, and one entry for every recipe in `recipes`."""
    import torch

    torch.set_num_threads(num_threads)
    ids = load_tokenizer(checkpoint).encode(PROSE.read_text(), add_special=True)[:num_tokens]
    if len(ids) < num_tokens:
        raise BenchError(f"the text has {len(ids)} tokens, not {num_tokens}")
    with PrivateDaemon() as daemon, torch.inference_mode():
        tell("float32 by plain torch")
        with attached(daemon, checkpoint, "f32", "float32") as attachment:
            perplexity, reference = _read(make_decoder(attachment, None), ids)
        recipes = []
        for setting in chosen:
            tell(f"{setting.quantization}, computed in {setting.compute_dtype}, precision {setting.matmul_precision}")
            with attached(daemon, checkpoint, setting.quantization, setting.compute_dtype) as attachment:
                ops = chosen_ops(daemon, setting.compute_dtype, num_threads, setting.matmul_precision)
                decoder = make_decoder(attachment, ops)
                found, last = _read(decoder, ids)
                recipes.append(
                    Quality(
                        **setting._asdict(),
                        kernels=decoder.kernels,
                        resident_bytes=attachment.resident_bytes,
                        perplexity=found,
                        relative_error=float((last - reference).norm() / reference.norm()),
                    )
                )
                del decoder
    return {
        "machine": machine(),
        "checkpoint": checkpoint.rsplit("/", 1)[-1],
        "num_tokens": num_tokens,
        "float32_perplexity": perplexity,
        "recipes": [asdict(quality) for quality in recipes],
    }


def _read(decoder: Decoder, ids: list[int]) -> tuple[float, Tensor]:
    """Perplexity of every token but the first, and the logits after the last: float32[vocab_size]."""
    import torch

    total, last = 0.0, torch.empty(0)
    for start, logits in _logits(decoder, ids):
        targets = torch.tensor(ids[start + 1 : start + 1 + len(logits)])
        predicted = logits[: len(targets)].log_softmax(dim=1)
        total -= float(predicted.gather(1, targets[:, None]).double().sum())
        last = logits[-1].clone()
    return math.exp(total / (len(ids) - 1)), last


def _logits(decoder: Decoder, ids: list[int]) -> Iterator[tuple[int, Tensor]]:
    """The text as one sequence in chunks: each chunk's first position, and float32[num_tokens, vocab_size]."""
    import torch

    from preload.engine.core.kv_cache import KVCache
    from preload.engine.kernels.attention import AttentionBatch

    num_blocks = -(-len(ids) // _BLOCK_SIZE) + 1
    cache = KVCache(decoder.spec, num_blocks, _BLOCK_SIZE, decoder.cache_dtype)
    table = torch.arange(1, num_blocks, dtype=torch.int32)[None]
    for start in range(0, len(ids), _CHUNK):
        end = min(start + _CHUNK, len(ids))
        positions = torch.arange(start, end)
        batch = AttentionBatch(
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=table,
            slot_mapping=positions + _BLOCK_SIZE,  # block 0 is the null block
            num_decodes=0,
        )
        hidden = decoder.forward(torch.tensor(ids[start:end]), positions, cache.layers, batch)
        yield start, decoder.compute_logits(hidden)
