"""Stop strings are found wherever tokens end, and never shown, not even in part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from preload.engine.frontend.stop_strings import StopScanner

letters = st.text(alphabet="ab", max_size=4)


@given(pieces=st.lists(letters, max_size=12), stop=st.lists(letters.filter(bool), max_size=4))
def test_what_is_shown_is_the_text_before_the_first_stop_string(pieces: list[str], stop: list[str]) -> None:
    scanner = StopScanner(tuple(stop))
    shown = "".join([scanner.add(piece) for piece in pieces]) + scanner.finish()
    text = "".join(pieces)
    found = [(start + len(item), start) for item in stop if (start := text.find(item)) >= 0]
    assert (shown, scanner.stopped) == (text[: min(found)[1]] if found else text, bool(found))


def test_the_stop_string_that_is_complete_first_wins_however_the_text_is_cut() -> None:
    for pieces in (["abab"], ["a", "b", "a", "b"], ["aba", "b"]):
        scanner = StopScanner(("abab", "ba"))
        assert "".join([scanner.add(piece) for piece in pieces]) == "a"
        assert scanner.stopped


@given(pieces=st.lists(letters, max_size=12))
def test_without_stop_strings_nothing_is_held_back(pieces: list[str]) -> None:
    scanner = StopScanner(())
    assert [scanner.add(piece) for piece in pieces] == pieces


def test_only_what_may_be_the_start_of_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(("STOP",))
    assert [scanner.add(piece) for piece in ("xS", "T", "O", "!S", "STOP", "more")] == [
        "x", "", "", "STO!", "S", "",
    ]  # fmt: skip
    assert scanner.stopped
    assert scanner.finish() == ""


def test_text_before_the_scanner_is_armed_is_no_part_of_a_stop_string() -> None:
    scanner = StopScanner(("STOP",))
    assert scanner.add("STOP ST", armed=False) == "STOP ST"
    assert scanner.add("OP") == "OP"
    assert not scanner.stopped
