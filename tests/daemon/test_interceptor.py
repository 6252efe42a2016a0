"""What becomes of a domain error on its way to a client."""

from __future__ import annotations

from preload.daemon.errors import LoaderDiedError
from preload.daemon.interceptor import shortened


def test_no_part_of_an_error_is_too_long_for_a_trailer_and_both_its_ends_stay() -> None:
    """gRPC would drop the answer with all that it says."""
    long = "begin " + "x" * 20_000 + " end"
    info = shortened(LoaderDiedError(long, {f"field {i}": long for i in range(50)}))
    texts = [info.message, *info.fields.values()]
    assert len(texts) == 51
    assert max(len(text.encode()) for text in texts) < 2_000
    assert all(text.startswith("begin ") and text.endswith(" end") for text in texts)
