"""The life of a core process: attach, build, warm up, serve, drain.

Owns the order of the phases and what is reported of them, and the ties to other processes: it dies with its
parent, and a daemon that goes away does not disturb it (its lease reclaims itself). Exit codes: 0 drained,
1 a broken invariant (with a traceback), 2 wrong configuration, 3 the weights cannot be attached or served.
Heavy imports happen inside, after the phase "exec" is recorded.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from preload.engine.errors import DeviceError, ManifestError, PreloadError, RequestError
from preload.engine.timeline import Timeline

from .config import EXIT_BAD_CONFIG, CoreConfig

if TYPE_CHECKING:
    from preload.engine.client import Attachment, LeaseEvent
    from preload.engine.models.decoder import Decoder

    from .core import EngineCore
    from .loop import StepLoop
    from .on_device import DeviceSteps
    from .placement import Placement
    from .scheduler import SchedulingOptions
    from .sizing import KVSizing

EXIT_NOT_SERVED = 3
WARM_UP_TOKENS = 4
"""Enough to touch every weight once, through a padded decode of several rows."""
SIGTERM_DRAIN_MS = 30_000
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT_BYTES, _MOST_KEPT_BYTES = 32 << 20, 1 << 30


def main(first_line_ns: int, argv: Sequence[str] | None = None, *, is_forked: bool = False) -> int:
    """Runs a core until it is drained; returns the exit code.

    A core forked from the template is tied to its frontend already; its parent is of no importance to it."""
    parent_pid = os.getppid()
    parser = argparse.ArgumentParser(prog="python -m preload.engine.core")
    parser.add_argument("--config-json", required=True, help="CoreConfig as a JSON object")
    try:
        config = CoreConfig.from_json(parser.parse_args(argv).config_json)
    except RequestError as error:
        return _fail(EXIT_BAD_CONFIG, error)
    if not is_forked:
        die_with_parent(config.parent_pid or parent_pid)
    timeline = Timeline()
    timeline.add("exec", config.spawned_at_ns or first_line_ns, first_line_ns)
    try:
        return run(config, timeline, first_line_ns)
    except RequestError as error:  # what this model cannot do
        return _fail(EXIT_BAD_CONFIG, error)
    except PreloadError as error:
        return _fail(EXIT_NOT_SERVED, error)


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent's spawning thread ends; ends it if that has happened."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def run(config: CoreConfig, timeline: Timeline, imports_start_ns: int) -> int:
    """From imports to the end of the drain. Raises PreloadError if it cannot start."""
    _set_up_torch(config)
    from .loop import StepLoop
    from .server import CoreServer, CoreService, Identity
    from .sizing import KVSizing

    timeline.add("imports", imports_start_ns)
    with timeline.phase("attach"):
        attachment = _attach_target(config)
        draft = _attach_draft(config, attachment.device) if config.speculate == "draft" else None
    for weights in filter(None, (attachment, draft)):
        weights.lease.on_event(_end_without_weights)
    weights_bytes = attachment.resident_bytes + (draft.resident_bytes if draft else 0)
    sizing = KVSizing(config, attachment.generation_id, weights_bytes)
    core = build_core(config, attachment, timeline, sizing, draft)
    gc.freeze()  # what is there now stays: later collections need not look at it
    with timeline.phase("ready"):
        loop = StepLoop(
            core,
            timeline,
            lambda: attachment.lease.report_phases(timeline.phases),
            (lambda: _promote(core, config, sizing)) if config.standby else None,
        )
        identity = Identity(
            generation_id=attachment.generation_id,
            weights_bytes=attachment.resident_bytes,
            kernels=core.runner.decoder.kernels,
        )
        service = CoreService(loop, timeline, identity)
        server = CoreServer(service, config.socket_path)
        server.serve()
    attachment.lease.report_phases(timeline.phases)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.drain(SIGTERM_DRAIN_MS))
    _run_or_die(loop)
    server.stop()
    for weights in filter(None, (attachment, draft)):
        weights.close()
    return 0


def _set_up_torch(config: CoreConfig) -> None:
    """Imports torch, with the threads and the memory allocator of a process that runs steps and nothing else."""
    # OpenMP reads this once, when torch is loaded. Its default is to spin at the end of every parallel loop, which
    # on shared CPUs (two cores during an update, a neighbour in the container) makes steps tens of times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    torch.set_num_interop_threads(1)
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    # The C library gives blocks of over 128 KiB back to the kernel when they are freed, and every step would fault
    # its activations in again. They are kept; what is larger than any of them (the KV cache) is not.
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)


def _attach_target(config: CoreConfig) -> Attachment:
    from preload.engine.client import attach

    return attach(
        config.checkpoint or None,
        generation_id=config.generation_id or None,
        recipe=config.recipe,
        runtime_dir=config.runtime_dir or None,
        role="target",
        device=config.device,
        tensors="torch",
        client="preload engine core",
        timeout_s=config.attach_timeout_s,
    )


def _end_without_weights(event: LeaseEvent) -> None:
    """Memory of a holder that has ended must not be read any more, not even for the rest of a step."""
    if event.kind == "failed":
        print(f"preload engine core: {event.detail}", file=sys.stderr, flush=True)
        os._exit(EXIT_NOT_SERVED)


def _attach_draft(config: CoreConfig, device: str) -> Attachment:
    """The draft model, under a lease of its own, where the model is."""
    from preload.engine.client import attach

    return attach(
        config.draft_checkpoint or None,
        generation_id=config.draft_generation_id or None,
        recipe=config.draft_recipe,
        role="draft",
        device=device,
        runtime_dir=config.runtime_dir or None,
        tensors="torch",
        client="preload engine core, draft model",
        timeout_s=config.attach_timeout_s,
    )


def build_core(
    config: CoreConfig, attachment: Attachment, timeline: Timeline, sizing: KVSizing, draft: Attachment | None = None
) -> EngineCore:
    """Decoder, KV cache and warm-up: the phases "build", "kv_cache" and "warm_up". `draft`: of the draft model.

    A standby gets the smallest cache there is: its memory comes with its promotion."""
    from .core import EngineCore
    from .memory import resolve_max_model_len
    from .placement import placement_of
    from .processors import load_processors
    from .speculation.build import speculate

    with timeline.phase("build"):
        placement = placement_of(attachment.device)
        decoder = _build_decoder(config, attachment, placement)
        draft_decoder = None if draft is None else _build_decoder(config, draft, placement, "draft")
        max_model_len = resolve_max_model_len(config.max_model_len, decoder.spec)
        processors = load_processors(config.logits_processors, config.max_num_seqs, decoder.spec.vocab_size)
        core = EngineCore(
            decoder,
            num_blocks=2,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            max_model_len=max_model_len,
            scheduling=_scheduling(config),
            processors=processors,
            placement=placement,
            on_device=_device_steps(config, decoder, placement, max_model_len),
        )
        if config.speculate != "none":
            speculate(
                core,
                config.speculate,
                num_draft_tokens=config.num_draft_tokens,
                verification=config.verification,
                draft=draft_decoder,
            )
    with timeline.phase("kv_cache"):
        (sizing.prepare if config.standby else sizing.allocate)(core)
    with timeline.phase("warm_up"):
        core.warm_up(min(WARM_UP_TOKENS, config.token_budget))
        if core.runner.on_device is not None:
            core.largest_steps()  # other shapes take other kernels, which are compiled now, not at the first request
    if config.graphs != "off" and not config.standby:
        core.use_graphs()
    if config.graphs == "before" and core.num_missing_graphs:
        with timeline.phase("graphs"):
            while core.num_missing_graphs:
                core.capture_graph()
    return core


def _device_steps(
    config: CoreConfig, decoder: Decoder, placement: Placement, max_model_len: int
) -> DeviceSteps | None:
    """What computes steps on a GPU; None on the host."""
    from .on_device import DeviceSteps
    from .speculation.options import num_draft_tokens

    if placement.device.type == "cpu":
        return None
    return DeviceSteps(
        decoder,
        placement.device,
        max_num_seqs=config.max_num_seqs,
        max_num_blocks=-(-max_model_len // config.block_size),
        num_draft_tokens=num_draft_tokens(config.speculate, config.num_draft_tokens),
    )


def _scheduling(config: CoreConfig) -> SchedulingOptions:
    from .scheduler import Policy, SchedulingOptions

    return SchedulingOptions(
        policy=Policy(config.scheduling_policy),
        max_num_active_seqs=config.max_num_active_seqs,
        long_prefill_threshold=config.long_prefill_threshold,
        prefix_caching=config.prefix_caching,
    )


def _build_decoder(config: CoreConfig, attachment: Attachment, placement: Placement, role: str = "target") -> Decoder:
    """The model of resident weights. Raises ManifestError if they are not one's; DeviceError or RequestError, telling
    which model it is, if nothing computes it here."""
    import torch

    from preload.engine.models.decoder import Decoder
    from preload.engine.models.spec import ModelSpec

    from .kernels import ops_on

    resolved = attachment.resolved_recipe
    if not resolved["spec"]:
        raise ManifestError(
            f"generation {attachment.generation_id} holds {resolved['model']!r} tensors without a model; "
            "load the checkpoint with a recipe that names one"
        )
    dtype = getattr(torch, resolved["compute_dtype"])
    spec = ModelSpec.from_dict(resolved["spec"])
    try:
        ops = ops_on(
            placement,
            config.runtime_dir,
            dtype,
            torch.get_num_threads(),
            config.attention_backend,
            config.matmul_precision,
            config.kv_cache_dtype,
        )
        decoder = Decoder(spec, attachment.tensors, attachment.layouts, dtype, ops)
    except (DeviceError, ManifestError, RequestError) as error:
        which = f"the {role} model (generation {attachment.generation_id})"
        raise type(error)(f"{which}: {error.message}", error.fields) from error
    print(f"preload engine core: {role} model, kernels: {decoder.kernels}", file=sys.stderr, flush=True)
    return decoder


def _promote(core: EngineCore, config: CoreConfig, sizing: KVSizing) -> None:
    """A standby's KV memory; its graphs are made while it serves, whatever was asked for: requests wait for it."""
    sizing.allocate(core)
    if config.graphs != "off":
        core.use_graphs()


def _run_or_die(loop: StepLoop) -> None:
    """Runs the step loop. An exception ends the process at once: threads that wait for outputs must not hold it."""
    try:
        loop.run()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _fail(code: int, error: PreloadError) -> int:
    print(f"preload engine core: {error.message}", file=sys.stderr, flush=True)
    return code
