"""Rotary frequencies and their scaling variants. Source of each formula: see its function.

Notation: d = head_dim, i = 0 … d/2 − 1, θ = rope.theta; unscaled, inv_freq_i = θ^(−2i/d). The angle of a token
at position p is p · inv_freq_i. Every variant here is a function of the position alone, never of the batch or of
how a prompt was split, so a sequence continued by another core gets the same angles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from preload.engine.errors import ManifestError
from preload.engine.models.spec import ModelSpec

Parameters = Mapping[str, float | bool | None]


class RotaryEmbedding:
    """Cosines and sines of positions, on a device. `divisors`: float32[head_dim/2] that divide inv_freq, or none."""

    def __init__(self, spec: ModelSpec, divisors: Tensor | None = None, device: torch.device | None = None) -> None:
        rope = spec.rope
        if rope.scaling not in SCALINGS:
            raise ManifestError(f"unknown rope scaling {rope.scaling!r}; known are {', '.join(SCALINGS)}")
        self._head_dim = spec.head_dim
        self._theta = rope.theta
        self._divisors = divisors
        self._dynamic_factor = 0.0
        self._max_position = spec.max_position_embeddings
        try:
            inv_freq, self._attention_factor = SCALINGS[rope.scaling](spec, rope.parameters)
            self._inv_freq = inv_freq.to(device)
            if rope.scaling == "dynamic":
                self._dynamic_factor = _number(rope.parameters, "factor")
        except KeyError as error:
            raise ManifestError(f"rope scaling {rope.scaling!r} needs the parameter {error}") from error

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: int64[num_tokens] → cos, sin: float32[num_tokens, head_dim/2]."""
        inv_freq = self._dynamic(positions) if self._dynamic_factor else self._inv_freq
        if self._divisors is not None:
            inv_freq = inv_freq / self._divisors
        angles = positions[:, None].float() * inv_freq
        return angles.cos() * self._attention_factor, angles.sin() * self._attention_factor

    def _dynamic(self, positions: Tensor) -> Tensor:
        """float32[num_tokens, d/2]: θ' = θ · (f·n/N − (f − 1))^(d/(d−2)) with n = max(p + 1, N), N the model's
        original length. Source: NTK-aware dynamic scaling as in Hugging Face's `_compute_dynamic_ntk_parameters`,
        with the length at which token p joined the sequence, which is what its generation loop uses."""
        d, factor = self._head_dim, self._dynamic_factor
        lengths = (positions + 1).clamp(min=self._max_position).double()
        base = self._theta * (factor * lengths / self._max_position - (factor - 1)) ** (d / (d - 2))
        exponents = torch.arange(0, d, 2, dtype=torch.float64, device=positions.device) / d
        return (base[:, None] ** -exponents).float()


def _plain(spec: ModelSpec, parameters: Parameters) -> tuple[Tensor, float]:
    """Source: arXiv 2104.09864, section 3.2.2."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    return 1.0 / (spec.rope.theta**exponents), 1.0


def _linear(spec: ModelSpec, parameters: Parameters) -> tuple[Tensor, float]:
    """inv_freq / factor. Source: position interpolation, arXiv 2306.15595."""
    return _plain(spec, parameters)[0] / _number(parameters, "factor"), 1.0


def _yarn(spec: ModelSpec, parameters: Parameters) -> tuple[Tensor, float]:
    """Interpolates low frequencies, keeps high ones, ramps between; cos and sin times the attention factor.

    Source: arXiv 2309.00071, sections 3.2 to 3.4; names and defaults of Hugging Face's `rope_scaling`.
    """
    d, theta = spec.head_dim, spec.rope.theta
    original = _number(parameters, "original_max_position_embeddings")
    factor = _number(parameters, "factor", spec.max_position_embeddings / original)

    def dimension_of(rotations: float) -> float:
        return d * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(_number(parameters, "beta_fast", 32.0))
    high = dimension_of(_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(d // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    plain = _plain(spec, parameters)[0]
    return plain / factor * ramp + plain * (1 - ramp), _yarn_attention_factor(parameters, factor)


def _yarn_attention_factor(parameters: Parameters, factor: float) -> float:
    """0.1·ln(factor) + 1, or the ratio of two such terms with `mscale` and `mscale_all_dim`."""
    if parameters.get("attention_factor") is not None:
        return _number(parameters, "attention_factor")

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return term(_number(parameters, "mscale")) / term(_number(parameters, "mscale_all_dim"))
    return term(1.0)


def _llama3(spec: ModelSpec, parameters: Parameters) -> tuple[Tensor, float]:
    """Wavelengths above L/low_freq_factor are divided by factor, those below L/high_freq_factor kept, the rest
    interpolated. Source: Llama 3.1's `apply_scaling`; names of Hugging Face's `rope_scaling`."""
    factor, low, high = (_number(parameters, n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _number(parameters, "original_max_position_embeddings")
    plain = _plain(spec, parameters)[0]
    wavelength = 2 * math.pi / plain
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / factor + smooth * plain, 1.0


def _number(parameters: Parameters, name: str, default: float | None = None) -> float:
    """A parameter, or the default if it is absent or null. Raises KeyError without a default."""
    value = parameters.get(name)
    if value is None:
        if default is None:
            raise KeyError(name)
        return default
    return float(value)


SCALINGS: dict[str, Callable[[ModelSpec, Parameters], tuple[Tensor, float]]] = {
    "none": _plain,
    "linear": _linear,
    "dynamic": _plain,
    "yarn": _yarn,
    "llama3": _llama3,
}
"""Scaling variant → (inv_freq: float32[head_dim/2], factor of cos and sin)."""
