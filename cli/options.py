"""Command-line options derived from configuration dataclasses: each setting is declared once, with its help."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_type_hints


def add_options(parser: argparse.ArgumentParser, config: type, skip: tuple[str, ...] = ()) -> None:
    """One option for each field of a dataclass; `metadata` may say {"cli": False} or {"positional": True}.

    An option that is not given leaves no trace in the result, so that the dataclass's default holds."""
    hints = get_type_hints(config)
    for item in fields(config):
        if item.name in skip or not item.metadata.get("cli", True):
            continue
        text = str(item.metadata.get("help", ""))
        if item.metadata.get("positional"):
            optional: dict[str, Any] = {} if item.default is MISSING else {"nargs": "?", "default": argparse.SUPPRESS}
            parser.add_argument(item.name, help=text, **optional)
        else:
            _add_option(parser, item, hints[item.name], text)


def _add_option(parser: argparse.ArgumentParser, item: Field[Any], hint: Any, text: str) -> None:
    flag = "--" + item.name.replace("_", "-")
    default = item.default if item.default is not MISSING else _made(item)
    shown = "" if default in ("", (), None) else f" (default: {str(default).replace('%', '%%')})"
    common: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": text + shown}
    if hint is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif str(hint).startswith("tuple["):
        parser.add_argument(flag, nargs="+", type=get_args(hint)[0], metavar="X", **common)
    else:
        parser.add_argument(
            flag, type=hint, metavar=hint.__name__.upper(), choices=item.metadata.get("choices"), **common
        )


def _made(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else None


def given(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """The values of `config`'s fields that were given; lists as tuples."""
    names = {item.name for item in fields(config)}
    values = {key: value for key, value in vars(arguments).items() if key in names}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def add_runtime_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runtime-dir", default=None, help="folder of the daemon's sockets")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """The options of a recipe."""
    from preload.engine.recipe import COMPUTE_DTYPES, QUANTIZATIONS

    parser.add_argument("--model", default="auto", help='model family, "auto" or "raw" (default: auto)')
    parser.add_argument("--quantization", default="keep", choices=QUANTIZATIONS, help="how weights stay resident")
    parser.add_argument("--compute-dtype", default="float32", choices=COMPUTE_DTYPES, help="dtype of activations")
    parser.add_argument(
        "--config-overrides",
        default="",
        metavar="JSON",
        help='keys of the model configuration: {"rope_theta": 1e6}',
    )


def recipe_of(arguments: argparse.Namespace) -> Any:
    """The Recipe that was given. Raises RequestError."""
    from preload.engine.recipe import Recipe, parse_overrides

    return Recipe(
        model=arguments.model,
        quantization=arguments.quantization,
        compute_dtype=arguments.compute_dtype,
        config_overrides=parse_overrides(arguments.config_overrides),
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """A generation named by an id (or a prefix of 8 digits) or by a checkpoint's path and recipe."""
    parser.add_argument("generation", help="generation id, a prefix of at least 8 digits, or a checkpoint's path")
    add_recipe(parser)


def target_of(arguments: argparse.Namespace) -> Any:
    """The Selector of a command's target: hexadecimal digits are an id unless a file has that name."""
    import os

    from preload.engine.client.control import make_selector

    name = arguments.generation
    if set(name) <= set("0123456789abcdef") and len(name) >= 8 and not os.path.exists(name):
        return make_selector(generation_id=name)
    return make_selector(name, recipe=recipe_of(arguments))
