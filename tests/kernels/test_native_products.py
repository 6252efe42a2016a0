"""Native products of every layout against the torch reference, and their promise of equal bits."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from preload.engine.kernels.activation import swiglu
from preload.engine.kernels.native.library import LAYOUT_IDS
from preload.engine.kernels.norm import rms_norm
from preload.engine.layers.linear import Linear, product_by_rows
from preload.engine.layers.native_ops import native_ops
from preload.engine.layers.ops import Experts, Norm, TorchOps
from preload.engine.layers.weights import Weight
from preload.engine.loading.gguf_types import BLOCK_TYPES
from preload.engine.quantization import int4_group32, int8_per_channel

TOLERANCE = 1e-5
"""Of the result's norm: what float32 sums of a few thousand terms in another order may differ by, and more."""
VARIANTS = ["native", "without AMX", "without integers", "without AVX-512"]
INTEGER_LAYOUTS = ["gguf.q4_0", "gguf.q4_1", "gguf.q8_0", "int8_per_channel", "int4_group32"]
EXACT = 1e-6
"""Of a product of random numbers: float32's own error is a tenth to a quarter of it."""
HALF_FIELDS = {"q6_k": [208], "q4_1": [0, 2], "q5_1": [0, 2], "q4_k": [0, 2], "q5_k": [0, 2]}
EXTREME = torch.tensor([0.0, -0.0, 6e-8, 1e-4, -0.02, 1.0, -3.5, 100.0, 65504.0, -65504.0]).half()


def random_weight(layout: str, rows: int, cols: int, extreme: bool = False) -> Weight:
    """Random bytes with scales of a sane size, or with zeros, subnormals and the largest halves among them."""
    generator = torch.Generator().manual_seed(rows * cols)
    if layout.startswith("dense."):
        dense = torch.randn(rows, cols, generator=generator)
        return Weight(layout, "dense", {"weight": dense.to(getattr(torch, layout.removeprefix("dense.")))})
    if not layout.startswith("gguf."):
        module = {"int8_per_channel": int8_per_channel, "int4_group32": int4_group32}[layout]
        return Weight(layout, layout, module.quantize(torch.randn(rows, cols, generator=generator)))
    kind = BLOCK_TYPES[layout.removeprefix("gguf.")]
    shape = (rows, cols // kind.block_size)
    blocks = torch.randint(0, 256, (*shape, kind.block_bytes), dtype=torch.uint8, generator=generator)
    for at in HALF_FIELDS.get(kind.name, [0]):
        halves = (torch.rand(shape, generator=generator) / 16).half()
        if extreme:
            halves = EXTREME[torch.randint(len(EXTREME), shape, generator=generator)]
        blocks[..., at : at + 2] = halves.unsqueeze(-1).view(torch.uint8)
    return Weight(layout, layout, {"weight": blocks.flatten(1)})


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (got.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("layout", LAYOUT_IDS)
def test_products_equal_the_reference(open_library: Any, layout: str, extreme: bool, variant: str) -> None:
    ops = native_ops(open_library(variant, 2), torch.float32)
    ragged = layout.startswith("dense.") or layout == "int8_per_channel"
    for rows, cols in [(1, 256), (37, 512), (130, 256), (5, 77 if ragged else 768)]:
        weight = random_weight(layout, rows, cols, extreme)
        x = torch.randn(128, cols, generator=torch.Generator().manual_seed(1))
        expected = product_by_rows(x, weight)
        project = ops.projection([Linear(weight)])
        for num_tokens in (1, 3, 8, 33, 128):
            got = project(x[:num_tokens])
            assert relative_error(got, expected[:num_tokens]) < TOLERANCE, (rows, cols, num_tokens)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUT_IDS)
def test_a_token_gets_the_same_bits_in_every_batch(open_library: Any, layout: str, variant: str) -> None:
    weight = random_weight(layout, 70, 512)
    x = torch.randn(300, 512, generator=torch.Generator().manual_seed(2))
    whole = native_ops(open_library(variant, 2), torch.float32).projection([Linear(weight)])(x)
    for num_threads in (1, 2):
        project = native_ops(open_library(variant, num_threads), torch.float32).projection([Linear(weight)])
        for num_tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 129):
            assert torch.equal(project(x[300 - num_tokens :]), whole[300 - num_tokens :])


def uneven_tokens(num_tokens: int, cols: int) -> torch.Tensor:
    """Random activations; one row spans six orders of magnitude, one is mostly a single column, one is zero."""
    x = torch.randn(num_tokens, cols, generator=torch.Generator().manual_seed(4))
    x[0] *= torch.logspace(-3, 3, cols)
    x[1, 40] = 3000.0
    x[2] = 0.0
    return x


@pytest.mark.parametrize("variant", ["native", "without AMX"])
@pytest.mark.parametrize("layout", INTEGER_LAYOUTS)
def test_integers_are_as_exact_as_floats(open_library: Any, layout: str, variant: str) -> None:
    library = open_library(variant, 2)
    if "integers" not in library.units:
        pytest.skip("the CPU or the compiler lacks AVX-512 VNNI")
    project = native_ops(library, torch.float32).projection([Linear(weight := random_weight(layout, 130, 1536))])
    x = uneven_tokens(40, 1536)
    expected = x.double() @ weight.rows(slice(0, 130)).double().T
    for got in (project(x), torch.cat([project(row[None]) for row in x])):
        assert relative_error(got[3:], expected[3:]) < EXACT
        assert relative_error(got[0], expected[0]) < EXACT
        assert relative_error(got[1], expected[1]) < EXACT
        assert not got[2].any()


@pytest.mark.parametrize("layout", INTEGER_LAYOUTS)
def test_tiles_give_the_bits_of_integer_vectors(open_library: Any, layout: str) -> None:
    libraries = [open_library(variant, 2) for variant in ("native", "without AMX")]
    if "tiles" not in libraries[0].units:
        pytest.skip("the CPU, the compiler or the kernel lacks AMX")
    for rows, cols in [(37, 512), (130, 1536), (64, 576)]:
        weight, x = random_weight(layout, rows, cols), uneven_tokens(140, cols)
        tiles, vectors = (native_ops(one, torch.float32).projection([Linear(weight)]) for one in libraries)
        for num_tokens in (5, 12, 17, 140):
            assert torch.equal(tiles(x[:num_tokens]), vectors(x[:num_tokens])), (rows, cols, num_tokens)


@pytest.mark.parametrize("brief_variant", ["bfloat16", "bfloat16 without AMX"])
@pytest.mark.parametrize("layout", LAYOUT_IDS)
def test_bfloat16_products_are_rounded_to_that_and_few_tokens_stay_exact(
    open_library: Any, layout: str, brief_variant: str
) -> None:
    libraries = [open_library(variant, 2) for variant in (brief_variant, "native")]
    if "bfloat16" not in libraries[0].units:
        pytest.skip("the CPU or the compiler lacks AVX-512 BF16")
    block = 256 if layout.endswith("_k") else 32
    for rows, cols in [(37, block), (130, 1536), (64, 3 * block)]:
        weight, x = random_weight(layout, rows, cols), torch.randn(600, cols)
        brief, exact = (native_ops(one, torch.float32).projection([Linear(weight)]) for one in libraries)
        dense = weight.rows(slice(0, rows))
        if layout != "int8_per_channel":  # whose rows are scaled when they have been multiplied
            dense = dense.bfloat16()
        rounded = x.bfloat16().double() @ dense.double().T
        whole = brief(x)
        assert relative_error(whole, rounded) < 1e-5
        assert 1e-4 < relative_error(whole, exact(x)) < 1e-2
        few = libraries[0].exact_tokens
        for num_tokens in (few + 1, 16, 17, 32, 33, 64, 129):
            assert torch.equal(brief(x[:num_tokens]), whole[:num_tokens]), (rows, cols, num_tokens)
        for num_tokens in (1, few):
            assert torch.equal(brief(x[:num_tokens]), exact(x[:num_tokens]))


def test_a_router_stays_exact_where_products_are_rounded(open_library: Any) -> None:
    """Rounded, it would send a few of these tokens to other experts."""
    library, count, hidden, inner = open_library("bfloat16", 2), 16, 64, 32
    if "bfloat16" not in library.units:
        pytest.skip("the CPU or the compiler lacks AVX-512 BF16")
    router, gate_up = (random_weight("dense.float32", rows, hidden) for rows in (count, count * 2 * inner))
    down = random_weight("dense.float32", count * hidden, inner)
    experts, norm = Experts(Linear(router), gate_up, down, 4), Norm(torch.ones(hidden), 1e-5)
    x = torch.randn(2000, hidden, generator=torch.Generator().manual_seed(5))
    got, expected = (ops.mixture(experts, norm)(x) - x for ops in (native_ops(library, torch.float32), TorchOps()))
    errors = (got - expected).norm(dim=1) / expected.norm(dim=1)
    assert 1e-4 < float(errors.max()) < 0.03


@pytest.mark.parametrize("num_tokens", [1, 9, 40])
@pytest.mark.parametrize("variant", ["native", "bfloat16", "bfloat16 without AMX"])
@pytest.mark.parametrize("layout", INTEGER_LAYOUTS)
def test_what_is_not_finite_stays_so_and_spoils_no_other_token(
    open_library: Any, layout: str, variant: str, num_tokens: int
) -> None:
    project = native_ops(open_library(variant, 2), torch.float32).projection([Linear(random_weight(layout, 20, 64))])
    x = torch.randn(num_tokens + 1, 64)
    clean = project(x)
    for broken in (math.nan, math.inf, -math.inf):
        x[-1, 50] = broken
        got = project(x)
        assert not got[-1].isfinite().any()
        assert torch.equal(got[:-1], clean[:-1])


def test_read_only_mapped_weights_are_read_where_they_are(open_library: Any) -> None:
    weight = random_weight("gguf.q4_1", 64, 576)
    data = weight.parts["weight"]
    with mmap.mmap(-1, data.nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        memory[:] = data.numpy().tobytes()
        _protect(memory)  # a write from here on kills the process
        mapped = torch.frombuffer(memory, dtype=torch.uint8).view(data.shape)
        project = native_ops(open_library("native", 2), torch.float32).projection(
            [Linear(Weight("w", "gguf.q4_1", {"weight": mapped}))]
        )
        x = torch.randn(9, 576)
        assert relative_error(project(x), product_by_rows(x, weight)) < TOLERANCE
        del mapped, project


def _protect(memory: mmap.mmap) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), mmap.PROT_READ) == 0


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("variant", [*VARIANTS, "bfloat16"])
def test_fused_operations_equal_their_steps(open_library: Any, num_tokens: int, variant: str) -> None:
    ops = native_ops(open_library(variant, 2), torch.float32)
    tolerance = 0.01 if variant == "bfloat16" else TOLERANCE
    gate, up = random_weight("gguf.q4_1", 100, 256), random_weight("gguf.q6_k", 100, 256)
    narrow = random_weight("int4_group32", 36, 256)
    x, residual = torch.randn(num_tokens, 256) * 3, torch.randn(num_tokens, 36)
    norm, bias = Norm(torch.rand(256) + 0.5, 1e-5), torch.randn(100)
    normed = rms_norm(x, norm.weight, norm.eps)
    wide = [product_by_rows(normed, gate) + bias, product_by_rows(normed, narrow)]
    got = ops.projection([Linear(gate, bias), Linear(narrow)], norm)(x)
    assert relative_error(got, torch.cat(wide, dim=1)) < tolerance
    got = ops.gated_projection(Linear(gate, bias), Linear(up), norm)(x)
    assert relative_error(got, swiglu(wide[0], product_by_rows(normed, up))) < tolerance
    expected = residual + product_by_rows(x, narrow)
    assert relative_error(ops.added_projection(Linear(narrow))(x, residual), expected) < tolerance


def test_swiglu_of_huge_gates_is_exact_at_both_ends(open_library: Any) -> None:
    """Where a naive exponential overflows."""
    weight = Weight("w", "dense", {"weight": torch.tensor([[1.0], [-1.0]])})
    up = Weight("u", "dense", {"weight": torch.tensor([[0.001], [0.001]])})
    norm = Norm(torch.tensor([1000.0]), 0.0)
    got = native_ops(open_library("native", 1), torch.float32).gated_projection(Linear(weight), Linear(up), norm)(
        torch.tensor([[2.0]])
    )
    torch.testing.assert_close(got, torch.tensor([[1000.0, 0.0]]))


def test_bfloat16_activations_get_native_products(open_library: Any) -> None:
    ops = native_ops(open_library("native", 2), torch.bfloat16)
    assert "native" in ops.describe()
    weight = random_weight("gguf.q8_0", 40, 64)
    x = torch.randn(3, 64).bfloat16()
    got = ops.projection([Linear(weight)])(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, product_by_rows(x, weight), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("strided", [False, True])
def test_no_tokens_and_strided_tokens_are_no_special_case(
    open_library: Callable[[str, int], Any], strided: bool
) -> None:
    weight = random_weight("dense.bfloat16", 10, 32)
    project = native_ops(open_library("native", 1), torch.float32).projection([Linear(weight)])
    x = torch.randn(4, 64)[:, ::2] if strided else torch.randn(0, 32)
    torch.testing.assert_close(project(x), product_by_rows(x, weight), atol=1e-5, rtol=1e-5)
