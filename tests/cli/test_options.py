from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from preload.cli.options import add_options, given


@dataclass(frozen=True, kw_only=True)
class Config:
    path: str = field(metadata={"help": "where", "positional": True})
    port: int = field(default=1, metadata={"help": "a port"})
    share: float = field(default=0.5, metadata={"help": "50% or so".replace("%", "%%")})
    uids: tuple[int, ...] = field(default=(), metadata={"help": "users"})
    verbose: bool = field(default=False, metadata={"help": "more"})
    hidden: str = field(default="", metadata={"cli": False})


def parse(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_options(parser, Config)
    return given(parser.parse_args(words), Config)


def test_only_what_was_given_is_passed_on() -> None:
    assert parse("/x") == {"path": "/x"}


def test_options_have_the_types_of_their_fields() -> None:
    assert parse("/x", "--port", "2", "--share", "0.25", "--uids", "3", "4", "--verbose") == {
        "path": "/x",
        "port": 2,
        "share": 0.25,
        "uids": (3, 4),
        "verbose": True,
    }


def test_only_some_fields_become_options_if_asked_for() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Config, only=("port",))
    assert "--port" in parser.format_help()
    assert "--share" not in parser.format_help()
    assert "path" not in parser.format_help()


def test_every_visible_field_is_in_the_help_and_no_hidden_one() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Config)
    text = parser.format_help()
    assert "--port" in text
    assert "50% or so" in text
    assert "hidden" not in text
