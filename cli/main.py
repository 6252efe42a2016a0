"""`preload`: finds the subcommand, imports only that one, and turns errors into a line and an exit code."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

COMMANDS = {
    "daemon": "keep weights resident: run the weight-cache daemon",
    "keeper": "run the daemon, and hold its weights while it restarts",
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
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        from importlib.metadata import version

        print(version("preload-llm"))
        return 0
    if name not in COMMANDS:
        print(f"preload: unknown command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    module = import_module(f"preload.cli.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"preload {name}", description=COMMANDS[name], allow_abbrev=False)
    module.configure(parser)
    return _run(module.run, parser.parse_args(words[1:]))


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
        from .exit_codes import code_of  # and with it grpc, which a keeper does without

        code = code_of(error)
        if code is None:
            raise
        print(f"preload: {error}", file=sys.stderr)
        return code


def _usage() -> str:
    lines = ["usage: preload COMMAND [OPTIONS]   (preload COMMAND --help says more)", ""]
    return "\n".join(lines + [f"  {name:13} {text}" for name, text in COMMANDS.items()])


if __name__ == "__main__":
    sys.exit(app())
