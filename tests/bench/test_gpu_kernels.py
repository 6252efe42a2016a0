"""What the GPU script multiplies has the size that its floor is reckoned from."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from preload.bench import gpu_kernels
from preload.engine.kernels.triton.products import LAYOUTS
from preload.engine.layers.weights import Weight
from preload.engine.quantization.layouts import COMPANIONS, companion_rows


@pytest.mark.parametrize("layout", ["dense", *LAYOUTS])
def test_weights_have_their_full_size(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "ROWS", 1024)
    monkeypatch.setattr(gpu_kernels, "COLS", 256)
    parts = gpu_kernels._weight(layout)
    weight = Weight(layout, layout, parts)
    assert (weight.num_rows, weight.num_cols) == (1024, 256)
    assert {part: parts[part].shape[0] for part in COMPANIONS.get(layout, ())} == {
        part: companion_rows(layout, part, 1024) for part in COMPANIONS.get(layout, ())
    }
    assert weight.rows(slice(1000, 1024)).isfinite().all()


def test_every_layout_has_a_row() -> None:
    names = gpu_kernels.names()
    assert all(any(layout in name for name in names) for layout in LAYOUTS)
    assert sum(name.startswith("attention") for name in names) == 2
