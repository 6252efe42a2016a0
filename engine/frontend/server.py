"""The frontend process: `run(config)` serves until a signal, and returns the exit code.

Order of the start: the socket listens first, so that clients wait instead of being refused; then the core is
spawned, because it takes longest; only then come this process's own imports and the tokenizer. Nothing here
imports torch or numpy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from preload.engine.core.config import CoreConfig
from preload.engine.errors import RequestError
from preload.engine.places import own_dir
from preload.engine.template.fingerprint import place_of
from preload.engine.timeline import Timeline, now_ns

from . import activation
from .config import FrontendConfig
from .console import make_stderr_unfailing
from .core_launch import TemplatedCommand
from .core_process import CoreCommand, CoreProcess
from .errors import StartError

if TYPE_CHECKING:
    from .deployment_factory import MakeCoreCommand
    from .service import Service

_BACKLOG = 2048


def run(
    config: FrontendConfig,
    *,
    timeline: Timeline | None = None,
    prepare: Callable[[FrontendConfig], FrontendConfig] = lambda config: config,
    make_command: MakeCoreCommand | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT. Returns 0 after a drain. Raises PreloadError when it cannot start or go on.

    `timeline` holds the phases of this process so far; without one, all of them count as "exec". `prepare` completes
    the configuration, once the address is known to be free. `make_command` replaces the command line of engine cores.
    Call it from the main thread.
    """
    make_stderr_unfailing()
    if timeline is None:
        timeline = Timeline()
        timeline.add("exec", process_start_ns())
    asyncio.run(_serve(config, prepare, make_command or make_core_command, timeline))
    return 0


def process_start_ns() -> int:
    """When this process was started, on CLOCK_MONOTONIC, from /proc; good to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return since_boot_ns - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - now_ns())


def make_core_command(config: FrontendConfig, standby: bool) -> CoreCommand:
    """The command line of an engine core for this configuration. Raises RequestError on an impossible one.

    A core of a known generation asks for that, so that it starts although the checkpoint has changed or is gone."""

    def command(socket_path: str, spawned_at_ns: int) -> list[str]:
        core = CoreConfig(
            runtime_dir=config.runtime_dir,
            checkpoint="" if config.generation else os.path.abspath(config.checkpoint),
            generation_id=config.generation,
            model=config.model,
            quantization=config.quantization,
            compute_dtype=config.compute_dtype,
            config_overrides=config.recipe().config_overrides,
            device=config.device,
            graphs=config.graphs,
            matmul_precision=config.matmul_precision,
            kv_cache_dtype=config.kv_cache_dtype,
            attention_backend=config.attention_backend,
            socket_path=socket_path,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            block_size=config.block_size,
            kv_cache_bytes=config.kv_cache_bytes,
            memory_utilization=config.memory_utilization,
            prefix_caching=config.prefix_caching,
            scheduling_policy=config.scheduling_policy,
            max_num_active_seqs=config.max_num_active_seqs,
            long_prefill_threshold=config.long_prefill_threshold,
            max_model_len=config.max_model_len,
            num_threads=config.num_threads,
            speculate=config.speculate,
            num_draft_tokens=config.num_draft_tokens,
            verification=config.verification,
            draft_checkpoint=os.path.abspath(config.draft_model) if _names_draft(config) else "",
            draft_generation_id=config.draft_generation,
            draft_quantization=config.draft_quantization,
            logits_processors=config.logits_processors,
            standby=standby,
            spawned_at_ns=spawned_at_ns,
            parent_pid=os.getpid(),
        )
        return [sys.executable, "-P", "-m", "preload.engine.core", "--config-json", core.to_json()]

    command("", 0)  # an impossible combination of options is found before anything is started
    return TemplatedCommand(command, place_of(config.runtime_dir)) if config.template else command


def _names_draft(config: FrontendConfig) -> bool:
    """Whether the draft model is asked for by its checkpoint."""
    return bool(config.draft_model) and not config.draft_generation


async def _serve(
    config: FrontendConfig,
    prepare: Callable[[FrontendConfig], FrontendConfig],
    make_command: MakeCoreCommand,
    timeline: Timeline,
) -> None:
    manager = activation.Manager()
    inherited = activation.take_listener()
    with inherited or _listen(config) as listener:
        with timeline.phase("load"):
            config = prepare(config)  # nothing else runs in this loop yet
        async with running_service(config, make_command, timeline) as service:
            from .web_server import serve_http

            await serve_http(service, listener, manager, outlives_us=inherited is not None)


@contextlib.asynccontextmanager
async def running_service(
    config: FrontendConfig, make_command: MakeCoreCommand, timeline: Timeline
) -> AsyncIterator[Service]:
    """The service; its core is being started when it is given, and all cores are gone afterwards.

    Raises StartError."""
    with _private_folder(config.runtime_dir) as socket_dir:
        with timeline.phase("spawn"):
            first_core = CoreProcess(0, socket_dir)
            await first_core.start(make_command(config, False))
        try:
            with timeline.phase("imports"):
                from .assembly import build_service
            service = build_service(config, make_command, socket_dir, first_core, timeline)
        except BaseException:
            await first_core.kill()
            raise
        service.watch(service.current.start(first_core))
        service.watch_first(service.current.supervisor)
        try:
            yield service
        finally:
            await service.stop()


@contextlib.contextmanager
def _listen(config: FrontendConfig) -> Iterator[socket.socket]:
    """The bound socket. Raises RequestError naming the address."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
            listener.listen(_BACKLOG)
        except OSError as error:
            raise RequestError(f"cannot listen on {config.host} port {config.port}: {error.strerror}") from error
        listener.setblocking(False)
        yield listener


@contextlib.contextmanager
def _private_folder(runtime_dir: str) -> Iterator[str]:
    """A folder of mode 0700 for the sockets of cores, removed at the end."""
    runtime_dir = own_dir(runtime_dir)
    prefix = "frontend-"
    try:
        os.makedirs(runtime_dir, mode=0o700, exist_ok=True)
        _remove_left_behind(Path(runtime_dir), prefix)
        folder = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=runtime_dir)
    except OSError as error:
        raise StartError(f"cannot make a folder in {runtime_dir}: {error}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left_behind(runtime_dir: Path, prefix: str) -> None:
    """Removes folders of frontends that were killed."""
    for folder in runtime_dir.glob(f"{prefix}*-*"):
        pid = folder.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(folder, ignore_errors=True)
