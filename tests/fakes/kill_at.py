"""Runs a process of the product as it is, but for this: at an armed failpoint it SIGKILLs itself.

    kill_at.py FOLDER PROCESSES -m MODULE [ARGUMENT…]
    kill_at.py FOLDER PROCESSES SCRIPT [ARGUMENT…]

PROCESSES names kinds of failpoints.py, with commas between. A failpoint is armed by a file FOLDER/<name>, which may
come at any time, holding JSON: `skip`, the calls to let pass, and `hold`. The one process that reaches it first turns
the file into FOLDER/<name>.reached, writes its pid there, and dies; or with `hold` it waits until that file is gone.
A module is wrapped when the product imports it, so that the order of imports stays the product's.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from failpoints import FAILPOINTS, Failpoint


class Trap:
    """What a wrapped function does at its failpoint."""

    def __init__(self, folder: Path, name: str) -> None:
        self._armed = folder / name
        self._reached = folder / f"{name}.reached"
        self._num_passed = 0

    def __call__(self) -> None:
        try:
            told = json.loads(self._armed.read_text())
            if self._num_passed < told["skip"]:
                self._num_passed += 1
                return
            os.rename(self._armed, self._reached)
        except FileNotFoundError:
            return
        self._reached.write_text(str(os.getpid()))
        if not told["hold"]:
            os.kill(os.getpid(), signal.SIGKILL)
        while self._reached.exists():
            time.sleep(0.002)


def wrapped(function: Callable[..., Any], when: str, trap: Callable[[], None]) -> Callable[..., Any]:
    """The same function with the trap before or after its body."""
    before, after = (trap, _nothing) if when == "before" else (_nothing, trap)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            before()
            result = await function(*args, **kwargs)
            after()
            return result

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before()
        result = function(*args, **kwargs)
        after()
        return result

    return call


def _nothing() -> None:
    pass


def wrap(folder: Path, name: str, point: Failpoint) -> None:
    owner, attribute = point.place()
    found = vars(owner)[attribute]
    function = found.__func__ if isinstance(found, staticmethod) else found
    trapped: Any = wrapped(function, point.when, Trap(folder, name))
    setattr(owner, attribute, staticmethod(trapped) if isinstance(found, staticmethod) else trapped)


class Finder(MetaPathFinder):
    """Wraps the functions of a module at the end of its import."""

    def __init__(self, folder: Path, points: dict[str, Failpoint]) -> None:
        self._folder = folder
        self._by_module: dict[str, dict[str, Failpoint]] = {}
        for name, point in points.items():
            self._by_module.setdefault(point.module, {})[name] = point

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._by_module:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for name, point in self._by_module[fullname].items():
                wrap(self._folder, name, point)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def main() -> None:
    folder, processes, *words = sys.argv[1:]
    chosen = {name: point for name, point in FAILPOINTS.items() if point.process in processes.split(",")}
    sys.meta_path.insert(0, Finder(Path(folder), chosen))
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]  # as with -P
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
