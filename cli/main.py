"""`preload`: finds the subcommand, imports only that one, and turns errors into a line and an exit code."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from typing import Any, NoReturn

COMMANDS = {
    "daemon": "keep weights resident: run the weight-cache daemon",
    "keeper": "run the daemon, and hold its weights while it restarts",
    "holder": "own the memory of one GPU behind IPC handles, so that it outlives the daemon",
    "template": "keep an engine core's imports ready, and fork cores from them",
    "load": "make a checkpoint resident",
    "serve": "serve a resident model with an OpenAI-compatible API",
    "rollout": "update a service to another checkpoint or other flags, without losing a request",
    "status": "show the daemon, its generations, leases and their phases",
    "ls": "list generations",
    "evict": "let go of a generation",
    "verify": "hash what is resident again and compare",
    "check": "tell whether an attach would succeed, and if not, why",
    "generate": "complete one prompt from resident weights",
    "install-units": "write unit files for systemd",
    "bench": "measure attaching and restarting on this machine",
}


def app(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit code: see cli/exit_codes.py."""
    words = sys.argv[1:] if argv is None else argv
    if not words:
        print(_usage(), file=sys.stderr)
        return 2
    name = words[0]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        from importlib.metadata import version

        print(version("preload-llm"))
        return 0
    if name not in COMMANDS:
        if "--json" in words:
            print(_wrong_words(f"unknown command {name!r}"))
        print(f"preload: unknown command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    module = import_module(f"preload.cli.{name.replace('-', '_')}")
    parser = _Parser(prog=f"preload {name}", description=COMMANDS[name], allow_abbrev=False)
    module.configure(parser)
    return _run(module.run, parser.parse_args(words[1:]))


class _Parser(argparse.ArgumentParser):
    """Tells of wrong arguments as of any other failure: in a line, and as an object if that was asked for."""

    asked_for_json = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.asked_for_json = "--json" in (args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if self.asked_for_json:
            print(_wrong_words(message))
        super().error(message)


def _wrong_words(message: str) -> str:
    return json.dumps({"error": {"reason": "BAD_REQUEST", "message": message, "exit_code": 2}})


def _run(run: object, arguments: argparse.Namespace) -> int:
    assert callable(run)
    try:
        return int(run(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone, as `preload ls | head` does: not a failure.
        sys.stderr.close()
        return 0
    except Exception as error:
        from .exit_codes import code_of, describe  # and with it grpc, which a keeper does without

        code = code_of(error)
        if getattr(arguments, "json", False):
            print(json.dumps({"error": describe(error)}), flush=True)
        if code is None:
            raise
        print(f"preload: {error}", file=sys.stderr)
        return code


def _usage() -> str:
    lines = ["usage: preload COMMAND [OPTIONS]   (preload COMMAND --help says more)", ""]
    lines += [f"  {name:13} {text}" for name, text in COMMANDS.items()]
    lines += [
        "",
        "Exit codes: 0 done, 2 wrong arguments, 10 no daemon, 11 not resident, 12 still loading, 13 load failed,",
        "15 checkpoint missing, 16 checkpoint wrong, 17 checkpoint changed, 18 no memory; the others are in",
        "docs/guide-operating.md. With --json, a failure prints",
        '{"error": {"reason": …, "message": …, "exit_code": …}} on stdout.',
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(app())
