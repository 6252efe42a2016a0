from __future__ import annotations

import io

import pytest

from preload.cli.exit_codes import code_of
from preload.cli.render import ProgressBar, size, table
from preload.cli.timeline import Track, phase_table, picture, total_s
from preload.engine import errors


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (98 << 20, "98.0 MiB"), (8 << 30, "8.00 GiB")],
)
def test_size_is_shown_in_binary_units(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_numbers_align_right_and_text_left() -> None:
    assert table(("name", "n"), [("a", "5"), ("bb", "10")]).splitlines() == [
        "name   n",
        "----  --",
        "a      5",
        "bb    10",
    ]


def test_progress_in_a_log_is_lines_and_ends_with_all_of_it() -> None:
    log = io.StringIO()
    bar = ProgressBar("load", log)
    for done in range(0, 101, 10):
        bar.update("read", done, 100)
    bar.close()
    assert "\r" not in log.getvalue()
    assert log.getvalue().splitlines()[-1] == "load: read 100 B of 100 B (100%)"


PHASES = [
    {"name": "exec", "start_ns": 0, "s": 0.5},
    {"name": "attach", "start_ns": 1_000_000_000, "s": 0.25},
    {"name": "first_token", "start_ns": 60_000_000_000, "s": 1.0},
]


def test_total_counts_gaps_but_not_the_wait_for_a_user() -> None:
    assert total_s(PHASES) == 1.25


def test_phase_table_puts_processes_side_by_side() -> None:
    text = phase_table([Track("cold", PHASES), Track("warm", PHASES[:1])])
    assert "500.0 ms  500.0 ms" in text
    assert "250.0 ms         -" in text


def test_picture_has_a_bar_for_each_phase_and_escapes_names() -> None:
    svg = picture([Track("a<b", PHASES)])
    assert svg.count("<title>") == 2
    assert "a&lt;b" in svg


def test_every_error_of_the_engine_has_an_exit_code_of_its_own() -> None:
    def leaves(cls: type[errors.PreloadError]) -> list[type[errors.PreloadError]]:
        below = [leaf for sub in cls.__subclasses__() for leaf in leaves(sub)]
        return [cls, *below]

    for cls in leaves(errors.PreloadError):
        assert code_of(cls("x")) not in (None, 0, 1)
    assert code_of(ValueError("a bug")) is None
    assert code_of(errors.CheckpointChangedError("x")) != code_of(errors.CheckpointError("x"))
