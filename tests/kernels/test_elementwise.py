"""Norm, rotary and SwiGLU references against their formulas, element by element."""

from __future__ import annotations

import math

import torch

from preload.engine.kernels.activation import swiglu
from preload.engine.kernels.norm import rms_norm
from preload.engine.kernels.rotary import apply_rotary


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([2.0, 10.0])
    got = rms_norm(x, weight, eps=1e-6)
    root = math.sqrt(12.5 + 1e-6)
    torch.testing.assert_close(got, torch.tensor([[2 * 3 / root, 10 * 4 / root], [0.0, 0.0]]))


def test_rms_norm_of_large_bfloat16_does_not_overflow() -> None:
    x = torch.full((1, 4), 1e20, dtype=torch.bfloat16)
    got = rms_norm(x.float(), torch.ones(4), eps=1e-6)
    assert got.isnan().logical_not().all()
    assert rms_norm(x / 1e10, torch.ones(4, dtype=torch.bfloat16), eps=1e-6).dtype == torch.bfloat16


def test_rotary_turns_each_pair_by_its_angle() -> None:
    x = torch.randn(5, 3, 8)
    angles = torch.randn(5, 4)
    got = apply_rotary(x, angles.cos(), angles.sin())
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 1, 4), angles[:, None])
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), dim=-1))


def test_swiglu_gates_with_silu() -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(swiglu(gate, up), gate / (1 + (-gate).exp()) * up)
