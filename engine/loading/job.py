"""One job of a loader, top to bottom: open → plan → grant → read → commit.

Owns the order of things and the messages to the daemon (protos/loader.proto); each stage is a module of its own.
An error of ours is told to the daemon, once; anything else is a bug and ends the process with a traceback.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from preload.engine.cuda.devices import HOST
from preload.engine.cuda.mapping import CUDA_IPC, CUDA_VMM, Shared
from preload.engine.errors import PreloadError, RequestError
from preload.engine.kernels.native.build import Compilation, KernelsUnavailableError, start_build
from preload.engine.recipe import Recipe
from preload.engine.timeline import Phase, Timeline
from preload.protos import loader_pb2, weight_cache_pb2

from .checkpoint import Checkpoint
from .control import Control, DaemonGoneError, make_memfd
from .destination import Destination, make_destination
from .digests import checkpoint_digest, outline
from .fill import Filled, Filler
from .plan import Plan, make_manifest, make_plan
from .receipts import make_receipts
from .resolve import check_tied, open_and_resolve
from .steps import Resolved
from .verify import read_manifest, verify

if TYPE_CHECKING:
    from .device_conversion import DeviceConversion

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_DAEMON_GONE = 2


def run_job(control_fd: int, started_ns: int) -> int:
    """Receives the job, does it, and returns the exit code. `started_ns`: when our first line ran."""
    timeline = Timeline()
    timeline.add("imports", started_ns)
    control = Control(control_fd)
    try:
        job, fds = control.receive_job()
        timeline.phases.insert(0, Phase("exec", job.spawned_at_ns or started_ns, started_ns))
        try:
            kernels = _start_kernels(job)
            try:
                _run(job, fds, control, timeline, kernels)
            finally:
                if kernels is not None:
                    kernels.cancel()
        except PreloadError as error:
            control.fail(error)
            return EXIT_FAILED
    except DaemonGoneError:
        return EXIT_DAEMON_GONE
    return EXIT_DONE


def _run(
    job: loader_pb2.Job, fds: list[int], control: Control, timeline: Timeline, kernels: Compilation | None
) -> None:
    num_threads = job.num_threads or os.cpu_count() or 1
    if job.mode == loader_pb2.MODE_VERIFY:
        _verify(fds, list(job.handles), job.device, num_threads, control)
        return
    _check_rank(job.rank)
    with timeline.phase("open"):
        checkpoint, resolved = open_and_resolve(job.checkpoint_path, Recipe.from_proto(job.recipe))
        for weights in checkpoint.weights:
            weights.file.advise_sequential()
        seen_outline = outline(checkpoint.tensors, resolved.to_json())
    if job.mode == loader_pb2.MODE_DIGEST:
        _digest(checkpoint, resolved, not job.outlines or seen_outline in job.outlines, num_threads, control)
        return
    with timeline.phase("plan"):
        targets = (target for step in resolved.steps for target in step.targets)
        plan = make_plan(targets, granularity_bytes=job.granularity_bytes or mmap.PAGESIZE)
    filled = _fill(job.device, resolved, plan, num_threads, control, timeline)
    with timeline.phase("commit"):
        receipts = make_receipts(checkpoint, filled.source_digests)
        digest = checkpoint_digest(checkpoint.tensors, filled.source_digests)
        manifest = make_manifest(resolved, plan, job.rank, digest, filled.resident_digests, seen_outline)
        memfds = [_memfd("manifest", manifest), _memfd("receipts", receipts)]
    if kernels is not None:
        with timeline.phase("kernels"):
            control.progress("kernels", resolved.num_source_bytes, resolved.num_source_bytes)
            _finish_kernels(kernels)
    committed = loader_pb2.Committed(phases=timeline.to_proto())
    control.send(loader_pb2.Update(committed=committed), memfds)


def _fill(
    device: str, resolved: Resolved, plan: Plan, num_threads: int, control: Control, timeline: Timeline
) -> Filled:
    """From the grant of segments to every byte in them; device memory is mapped no longer than that."""
    is_host = device in ("", HOST)
    conversion: DeviceConversion | None = None
    if is_host:
        destination = make_destination(device)
    else:
        with timeline.phase("device"):
            destination = make_destination(device)
    with destination:
        with timeline.phase("grant"):
            control.send(loader_pb2.Update(plan=loader_pb2.Plan(segment_bytes=plan.segment_bytes)))
            destination.open(control.receive_grant(plan.segment_bytes, is_host=is_host))
        if any(step.converts for step in resolved.steps):
            with timeline.phase("import torch"):
                from .convert import use_one_thread  # torch

                use_one_thread()
            if not is_host:
                conversion = _conversion(device, resolved, destination)
        with timeline.phase("read"):
            filled = _read(resolved, plan, destination, num_threads, control, "read", conversion)
            destination.finish()
        if conversion is not None:
            print(f"conversion took {conversion.device.release()}", file=sys.stderr, flush=True)
        return filled


def _conversion(device: str, resolved: Resolved, destination: Destination) -> DeviceConversion | None:
    """What converts on the device that the weights go to, if it can; said in any case."""
    from .cuda_conversion import choose_device
    from .device_conversion import DeviceConversion

    found, text = choose_device(device)
    packed = any(step.packing is not None for step in resolved.steps)
    by_cpu = "; packed weights by the CPU because they are converted whole" if packed and found is not None else ""
    print(f"weights are {text}{by_cpu}", file=sys.stderr, flush=True)
    return None if found is None else DeviceConversion(found, destination.address)


def _digest(checkpoint: Checkpoint, resolved: Resolved, matches: bool, num_threads: int, control: Control) -> None:
    """Hashes the bytes, unless the headers tell already that nobody has these weights."""
    digested = loader_pb2.Digested(resolved_recipe=resolved.to_json(), matches=matches)
    digests = None
    if matches:
        digests = _read(resolved, None, None, num_threads, control, "digest").source_digests
        digested.checkpoint_digest = checkpoint_digest(checkpoint.tensors, digests)
    receipts = make_receipts(checkpoint, digests)
    control.send(loader_pb2.Update(digested=digested), [_memfd("receipts", receipts)])


def _start_kernels(job: loader_pb2.Job) -> Compilation | None:
    """A compiler working beside the load, if the engines' kernels are not in the cache yet."""
    if job.mode != loader_pb2.MODE_LOAD or not job.kernel_cache_dir:
        return None
    try:
        found = start_build(Path(job.kernel_cache_dir))
    except KernelsUnavailableError as error:
        _warn_of_kernels(error)
        return None
    return found if isinstance(found, Compilation) else None


def _finish_kernels(kernels: Compilation) -> None:
    try:
        kernels.wait()
    except KernelsUnavailableError as error:
        _warn_of_kernels(error)


def _warn_of_kernels(error: KernelsUnavailableError) -> None:
    """Weights are good without kernels: the load goes on, and engines compute with torch, or try again."""
    print(f"native kernels are not built: {error}", file=sys.stderr, flush=True)


def _read(
    resolved: Resolved,
    plan: Plan | None,
    destination: Destination | None,
    num_threads: int,
    control: Control,
    phase: str,
    conversion: DeviceConversion | None = None,
) -> Filled:
    """Moves or only hashes all bytes. Raises CheckpointError, also when tied weights turn out to differ."""
    total_bytes = resolved.num_source_bytes
    filler = Filler(resolved, plan, destination.write if destination else None, conversion)
    filled = filler.run(num_threads, lambda done_bytes: control.progress(phase, done_bytes, total_bytes))
    check_tied(resolved, filled.source_digests)
    return filled


def _verify(fds: list[int], handles: list[bytes], device: str, num_threads: int, control: Control) -> None:
    if not fds:
        raise RequestError("a verify job needs the manifest's descriptor, and those of the segments or their handles")
    manifest = read_manifest(fds[0])
    result = verify(
        manifest,
        Shared(list(manifest.segment_bytes), fds[1:], handles, CUDA_IPC if handles else CUDA_VMM),
        device,
        num_threads,
        lambda done_bytes, total_bytes: control.progress("verify", done_bytes, total_bytes),
    )
    control.verified(result)


def _check_rank(rank: weight_cache_pb2.Rank) -> None:
    for size in ("tp_size", "pp_size", "ep_size", "dp_size"):
        if getattr(rank, size) > 1:
            raise RequestError(f"rank {size}={getattr(rank, size)} is not supported; only 1 is")
    if rank.role not in ("", "target", "draft"):
        raise RequestError(f"unknown role {rank.role!r}; known are target and draft")


def _memfd(name: str, message: weight_cache_pb2.Manifest | loader_pb2.Receipts) -> int:
    return make_memfd(f"preload-{name}", message.SerializeToString(deterministic=True))
