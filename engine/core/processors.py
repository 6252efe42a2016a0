"""Custom logits processors: what one looks like, how they are loaded, and how the sampler runs them.

A processor is foreign code in the core's process. What it raises costs the requests that use it, and no other: it is
given the logits of these alone, and where it fails on all of them together, each is tried by itself. A processor that
is not what it should be is refused when the core starts.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from preload.engine.errors import RequestError

from .request import Request

ENTRY_POINT_GROUP = "preload.logits_processors"
_PARAM = {"param": "logits_processors"}
_METHODS = ("validate_params", "add_request", "apply_staged_writes", "apply")


@dataclass(frozen=True, kw_only=True)
class LogitsContext:
    """Whose logits a processor is given. A logit row is the choice of the token after `positions`."""

    idx_mapping: Tensor
    """int64[num_requests]: request row of each request."""
    expanded_idx_mapping: Tensor
    """int64[num_logit_rows]: request row of each logit row."""
    expanded_local_pos: Tensor
    """int64[num_logit_rows]: of each logit row among its request's, from 0."""
    input_ids: Tensor
    """int64[num_logit_rows]: the last token before the one to be chosen."""
    positions: Tensor
    """int64[num_logit_rows]: that token's position in the sequence, from 0."""


class Processor(Protocol):
    """A custom logits processor. It is made once, with the keyword arguments max_num_seqs: int and vocab_size: int.

    State belongs to request rows, of which there are max_num_seqs: a request has one while it runs, and gets another,
    by another `add_request`, after a preemption or in another core. Processors that change logits depending on the
    output so far find it in the requests' `input_ids`, step by step, and must not count on seeing all of it."""

    def validate_params(self, params: Any) -> None:
        """Raises an exception, whose text the client reads, if a request must not have these parameters."""

    def add_request(self, row: int, params: Any) -> bool:
        """A request takes a row: overwrites all of the row's state. Returns whether its logits are to be changed.

        `params` are valid; None when the request says nothing about this processor."""

    def apply_staged_writes(self) -> None:
        """Brings what `add_request` has collected to where `apply` reads it. Called once before each `apply`."""

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """New logits, or the same changed in place: float32[num_logit_rows, vocab_size]."""


Factory = Callable[..., Processor]


def load_processors(qualnames: Sequence[str], max_num_seqs: int, vocab_size: int) -> dict[str, Processor]:
    """Processors by name: those named "package.module:Class", whose name is their class's, and those of the entry
    point group, whose name is the entry point's. Raises RequestError naming what is wrong with which."""
    importlib.invalidate_caches()
    factories: dict[str, Factory] = {}
    for name, factory in [*map(_import, qualnames), *_entry_points()]:
        if factories.setdefault(name, factory) is not factory:
            raise RequestError(f"there are two logits processors with the name {name!r}; rename one")
    return {name: _make(name, factory, max_num_seqs, vocab_size) for name, factory in factories.items()}


def _import(qualname: str) -> tuple[str, Factory]:
    module_name, colon, class_name = qualname.partition(":")
    if not (module_name and colon and class_name):
        raise RequestError(f"{qualname!r} names no logits processor; write package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise RequestError(f"the logits processor {qualname} cannot be imported: {_told(error)}") from error
    factory = getattr(module, class_name, None)
    if factory is None:
        raise RequestError(f"the module {module_name} has no {class_name!r}, which is named as a logits processor")
    return class_name, _checked(qualname, factory)


def _entry_points() -> list[tuple[str, Factory]]:
    found = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            factory = entry.load()
        except Exception as error:
            raise RequestError(
                f"the logits processor {entry.value}, an entry point of the group {ENTRY_POINT_GROUP}, cannot be "
                f"imported: {_told(error)}; repair or uninstall its package"
            ) from error
        found.append((entry.name, _checked(entry.value, factory)))
    return found


def _checked(qualname: str, factory: Any) -> Factory:
    if not isinstance(factory, type):
        raise RequestError(f"the logits processor {qualname} is no class")
    for method in _METHODS:
        if not callable(getattr(factory, method, None)):
            raise RequestError(f"the logits processor {qualname} has no method {method!r}")
    return factory


def _make(name: str, factory: Factory, max_num_seqs: int, vocab_size: int) -> Processor:
    try:
        return factory(max_num_seqs=max_num_seqs, vocab_size=vocab_size)
    except Exception as error:
        raise RequestError(
            f"the logits processor {name} cannot be made with max_num_seqs={max_num_seqs}, "
            f"vocab_size={vocab_size}: {_told(error)}"
        ) from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class CustomProcessors:
    """The processors of one core, and which rows each of them changes."""

    def __init__(self, processors: Mapping[str, Processor]) -> None:
        self._processors = processors
        self._users: dict[str, dict[int, Request]] = {name: {} for name in processors}
        self._broken: dict[int, str] = {}

    def validate(self, params: Mapping[str, Any]) -> None:
        """Raises RequestError naming the processor that is not there, or that refuses."""
        for name, value in params.items():
            processor = self._processors.get(name)
            if processor is None:
                known = ", ".join(sorted(self._processors)) or "none is loaded"
                raise RequestError(f"there is no logits processor {name!r} here ({known})", _PARAM)
            try:
                processor.validate_params(value)
            except Exception as error:
                raise RequestError(
                    f"the logits processor {name!r} refuses its parameters: {error}", _PARAM
                ) from error

    def add(self, row: int, request: Request) -> None:
        """A request takes a row."""
        self._broken.pop(row, None)
        for name, processor in self._processors.items():
            self._users[name].pop(row, None)
            try:
                if processor.add_request(row, request.sampling.logits_processors.get(name)):
                    self._users[name][row] = request
            except Exception as error:  # noqa: BLE001  foreign code
                self._broken[row] = _failure(name, error)

    def changes(self, row: int) -> bool:
        """Whether any of them changes the row's logits."""
        return row in self._broken or any(row in users for users in self._users.values())

    def apply(self, logits: Tensor, index_of: Mapping[int, int], failed: dict[int, str]) -> None:
        """Changes logits float32[num_rows, vocab_size] in place, one processor after the other.

        index_of: request row → logit row. Adds to `failed`, by request row, why it has no logits; these are passed
        over."""
        failed |= {row: error for row, error in self._broken.items() if row in index_of}
        for name, processor in self._processors.items():
            users = [r for row, r in self._users[name].items() if row in index_of and row not in failed]
            if not users:
                continue
            try:
                self._run(processor, logits, users, index_of)
            except Exception as error:  # noqa: BLE001  foreign code
                if len(users) == 1:
                    failed[users[0].row] = _failure(name, error)
                else:
                    self._run_apart(name, logits, users, index_of, failed)

    def _run_apart(
        self, name: str, logits: Tensor, users: Sequence[Request], index_of: Mapping[int, int], failed: dict[int, str]
    ) -> None:
        """Finds out whose logits it fails on."""
        for request in users:
            try:
                self._run(self._processors[name], logits, [request], index_of)
            except Exception as error:  # noqa: BLE001  foreign code
                failed[request.row] = _failure(name, error)

    @staticmethod
    def _run(processor: Processor, logits: Tensor, users: Sequence[Request], index_of: Mapping[int, int]) -> None:
        """The logits are touched only when the processor has returned."""
        indices = torch.tensor([index_of[request.row] for request in users])
        own = logits[indices]
        processor.apply_staged_writes()
        changed = processor.apply(own, _context(users))
        if not isinstance(changed, Tensor) or changed.shape != own.shape or changed.dtype != own.dtype:
            shape = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise TypeError(f"apply returned {shape} instead of float32{list(own.shape)}")
        logits[indices] = changed


def _context(users: Sequence[Request]) -> LogitsContext:
    rows = torch.tensor([request.row for request in users])
    last = [request.output_ids[-1] if request.output_ids else request.prompt_ids[-1] for request in users]
    return LogitsContext(
        idx_mapping=rows,
        expanded_idx_mapping=rows,
        expanded_local_pos=torch.zeros_like(rows),
        input_ids=torch.tensor(last),
        positions=torch.tensor([request.num_tokens - 1 for request in users]),
    )


def _failure(name: str, error: BaseException) -> str:
    """What the client is told; whoever wrote the processor finds the rest in the core's output."""
    traceback.print_exception(error)
    return f"the logits processor {name!r} failed: {_told(error)}"
