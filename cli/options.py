"""Command-line options derived from configuration dataclasses: each setting is declared once, with its help."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

if TYPE_CHECKING:
    from preload.engine.client import Control

_ID_DIGITS = 8
STARTING_S = 5.0
"""How long a command that sets something up waits for a daemon that may just have been started."""


def add_options(parser: argparse.ArgumentParser, config: type, only: tuple[str, ...] = ()) -> None:
    """One option for each field of a dataclass, or for `only` these; `metadata` may say {"cli": False} or
    {"positional": True}.

    An option that is not given leaves no trace in the result, so that the dataclass's default holds."""
    hints = get_type_hints(config)
    for item in fields(config):
        if (only and item.name not in only) or not item.metadata.get("cli", True):
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
    elif item.metadata.get("repeatable"):
        parser.add_argument(flag, action="append", type=get_args(hint)[0], metavar="X", **common)
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


def add_daemon(parser: argparse.ArgumentParser, wait_s: float = 0.0) -> None:
    """The options of a command that asks the daemon: see `control_of`."""
    add_runtime_dir(parser)
    add_wait_daemon(parser, wait_s)


def add_wait_daemon(parser: argparse.ArgumentParser, wait_s: float) -> None:
    parser.add_argument(
        "--wait-daemon",
        type=seconds,
        default=wait_s,
        metavar="SECONDS",
        help=f"time that a daemon which is just being started may take until it serves (default: {wait_s:g})",
    )


def control_of(arguments: argparse.Namespace) -> Control:
    """The connection to the daemon that was named. Raises PreloadError."""
    from preload.engine.client import Control

    return Control(arguments.runtime_dir, wait_s=arguments.wait_daemon)


def add_json(parser: argparse.ArgumentParser, what: str = "one JSON object") -> None:
    text = f"print {what} instead of text; a failure is one object with the key error: its reason, message, exit_code"
    parser.add_argument("--json", action="store_true", help=text)


def seconds(text: str) -> float:
    """A time for argparse: not negative, and finite."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value


def positive(text: str) -> int:
    """A count for argparse: at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def name(text: str) -> str:
    """A path or another name for argparse. An empty one, such as a shell makes of an unset variable, is refused: as
    a path it would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name means nothing")
    return text


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=name, help="folder or file: safetensors or GGUF")


def add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make the checkpoint resident first if it is not (default: --load)",
    )


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """The options of a recipe."""
    from preload.engine.recipe import COMPUTE_DTYPES, QUANTIZATIONS

    parser.add_argument("--model", default="auto", help='model family, "auto" or "raw" (default: auto)')
    known = ", ".join(QUANTIZATIONS)
    parser.add_argument("--quantization", default="keep", help=f"how weights stay resident: {known} (default: keep)")
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


def add_target(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """A generation named by an id (or a prefix of 8 digits), by @ and its serial, or by a checkpoint's path and
    recipe."""
    parser.add_argument(
        "generation",
        type=name,
        nargs="?" if optional else None,
        help="generation id, a prefix of at least 8 digits, a name such as @7, or a checkpoint's path",
    )
    add_recipe(parser)
    add_device(parser, None)


def add_device(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Where weights are, or are to be: see `resolve_device` of engine/cuda/devices.py."""
    meaning = "host" if default else "host for a path, and wherever it is resident for a generation"
    parser.add_argument(
        "--device",
        type=name,
        default=default,
        help=f"host, cuda:<index> as this process sees it, or a GPU's UUID (default: {meaning})",
    )


def target_of(arguments: argparse.Namespace) -> Any:
    """The Selector of a command's target: hexadecimal digits, or @ and digits, are a generation unless a file has
    that name. Raises RequestError on digits that are too few."""
    import os

    from preload.engine.client.control import make_selector
    from preload.engine.cuda.devices import resolve_device
    from preload.engine.errors import RequestError

    target = arguments.generation
    device = resolve_device(arguments.device) if arguments.device else ""
    if not os.path.exists(target):
        is_hexadecimal = set(target) <= set("0123456789abcdef")
        if is_hexadecimal and len(target) < _ID_DIGITS:
            raise RequestError(
                f"{target} is no file here, and a generation's id needs at least {_ID_DIGITS} of its digits "
                f"(if it is meant as a path: ./{target})"
            )
        if is_hexadecimal or (target[0] == "@" and target[1:].isdigit()):
            return make_selector(generation_id=target, device=device)
    return make_selector(target, recipe=recipe_of(arguments), device=device)
