"""Settings of a core, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from preload.engine.core.config import CoreConfig
from preload.engine.core.memory import (
    MemoryProfile,
    available_bytes,
    given_kv_blocks,
    measure_peak,
    num_kv_blocks,
    remembered_peak,
    resolve_max_model_len,
    total_bytes,
)
from preload.engine.errors import CoreError, RequestError
from preload.engine.models.spec import RopeSpec

SIZES = {"block_bytes": 1000, "block_size": 16, "max_model_len": 160}


def profile(available: int, **changes: int) -> MemoryProfile:
    return MemoryProfile(
        **{
            "total_bytes": 200_000,
            "available_bytes": available,
            "weights_bytes": 60_000,
            "core_bytes": 10_000,
            **changes,
        }
    )


def test_a_configuration_survives_json_and_every_field_has_help() -> None:
    config = CoreConfig(checkpoint="/x y", config_overrides={"rope_theta": 1.5}, max_num_seqs=3, spawned_at_ns=7)
    assert CoreConfig.from_json(config.to_json()) == config
    assert all(field.metadata["help"] for field in fields(CoreConfig))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "list, not an object"),
        ('{"max_seqs": 1}', "unknown settings of the core: max_seqs"),
        ('{"max_num_seqs": 0}', "max_num_seqs is 0"),
        ('{"token_budget": 10}', "less than max_num_seqs"),
        ('{"kv_cache_dtype": "fp8"}', "kv_cache_dtype is 'fp8'; it must be one of auto, float32, bfloat16"),
        ('{"matmul_precision": "low"}', "matmul_precision is 'low'; it must be highest or medium"),
        ('{"block_size": 0}', "block_size is 0; it must be a multiple of 16"),
        ('{"block_size": 24}', "block_size is 24; it must be a multiple of 16"),
        ('{"kv_cache_bytes": -1}', "kv_cache_bytes is -1"),
        ('{"memory_utilization": 1.5}', "memory_utilization is 1.5"),
        ('{"scheduling_policy": "lifo"}', "scheduling_policy is 'lifo'; it must be fcfs or priority"),
    ],
)
def test_impossible_configurations_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        CoreConfig.from_json(text)


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (200_000, 20),  # a tenth
        (50_000, 11),  # at least one sequence of full length
        (10_000_000, 41),  # at most all sequences of full length
    ],
)
def test_the_kv_cache_takes_a_share_within_its_bounds(available: int, expected: int) -> None:
    assert num_kv_blocks(profile(available), 0.0, max_num_seqs=4, **SIZES) == expected


@pytest.mark.parametrize(
    ("utilization", "available", "expected"),
    [
        (0.6, 190_000, 120_000 - 60_000 - 10_000 - 15_000),  # what weights, core and its largest step leave
        (1.0, 90_000, 90_000 - 15_000),  # no more than there is
    ],
)
def test_with_a_utilization_the_kv_cache_takes_what_is_left(
    utilization: float, available: int, expected: int
) -> None:
    taken = profile(available, peak_bytes=15_000)
    assert taken.kv_cache_bytes(utilization) == expected
    assert num_kv_blocks(taken, utilization, max_num_seqs=20, **SIZES) == expected // 1000
    assert f"KV cache {expected / 2**20:,.1f} MiB" in taken.describe(expected)


def test_a_utilization_that_leaves_nothing_is_refused_with_the_numbers() -> None:
    with pytest.raises(CoreError, match=r"0.4 of 200000 .* weights take 60000, the core 10000 .* largest step 10000"):
        num_kv_blocks(profile(90_000, peak_bytes=10_000), 0.4, max_num_seqs=4, **SIZES)


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_numbers() -> None:
    with pytest.raises(RequestError, match=r"10999 bytes .* 160 tokens, which needs 11000"):
        given_kv_blocks(10_999, **SIZES)
    with pytest.raises(CoreError, match=r"needs a KV cache of 11000 bytes, and 10999"):
        num_kv_blocks(profile(10_999), 0.0, max_num_seqs=4, **SIZES)
    assert given_kv_blocks(12_500, **SIZES) == 12


def test_a_peak_is_measured_in_touched_bytes_and_only_once(tmp_path: Path) -> None:
    def work() -> None:
        bytearray(64 << 20)

    measured: list[int] = []

    def measure() -> int:
        measured.append(measure_peak(work))
        return measured[-1]

    peak = remembered_peak(tmp_path / "profiles", {"code": "a"}, measure)
    assert peak >= 60 << 20
    assert remembered_peak(tmp_path / "profiles", {"code": "a"}, measure) == peak
    remembered_peak(tmp_path / "profiles", {"code": "b"}, measure)
    assert len(measured) == 2
    for kept in (tmp_path / "profiles").glob("*.json"):
        kept.write_text("{")
    remembered_peak(tmp_path / "profiles", {"code": "a"}, measure)
    assert len(measured) == 3


def test_a_control_group_limits_what_is_available(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/pod/app\n")
    (root / "pod" / "app").mkdir(parents=True)
    assert (total_bytes(proc, root), available_bytes(proc, root)) == (9000 * 1024, 8000 * 1024)
    (root / "pod" / "app" / "memory.max").write_text("max\n")
    (root / "pod" / "memory.max").write_text("5000000\n")
    (root / "pod" / "memory.current").write_text("3000000\n")
    (root / "pod" / "memory.stat").write_text("anon 5\ninactive_file 400000\n")
    assert (total_bytes(proc, root), available_bytes(proc, root)) == (5_000_000, 2_400_000)


def test_the_model_length_is_the_models_unless_asked_and_never_more(tiny: Any) -> None:
    assert resolve_max_model_len(0, tiny.spec) == 64
    assert resolve_max_model_len(10, tiny.spec) == 10
    assert resolve_max_model_len(0, replace(tiny.spec, max_position_embeddings=131072)) == 8192
    assert resolve_max_model_len(131072, replace(tiny.spec, max_position_embeddings=131072)) == 131072
    with pytest.raises(RequestError, match="max_model_len 65 is more than the model's 64"):
        resolve_max_model_len(65, tiny.spec)
    dynamic = replace(tiny.spec, rope=RopeSpec(scaling="dynamic", parameters={"factor": 2.0}))
    assert resolve_max_model_len(100, dynamic) == 100
