"""The results of gpu_restart.py as a table for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def show(result: dict[str, Any]) -> None:
    machine, sections = result["machine"], result["sections"]
    gib = 1 << 30
    print(f"{machine['gpu']} ({machine['driver']}), {machine['gpu_total_bytes'] / gib:.1f} GiB, of which "
          f"{machine['gpu_free_bytes'] / gib:.1f} free; {machine['cpu']}, {machine['cores']} cores")  # fmt: skip
    if machine["driver"] == "emulated driver":
        print("emulated driver: no figure here says anything about a GPU")
    for name, rows in sections.items():
        print(f"\n{name} ({result['seconds'][name]} s)")
        _SHOWS[name](rows)
    for title in ("skipped", "failed"):
        for name, why in result[title].items():
            print(f"\n{title}: {name}: {why}")


def _questions(rows: list[dict[str, str]]) -> None:
    for row in rows:
        print(f"  {row['question']}?\n      {row['answer']}")


def _events(rows: list[dict[str, str]]) -> None:
    width = max(len(row["event"]) for row in rows)
    for row in rows:
        print(f"  {row['event']:{width}}  {row['found']}")


def _attach(rows: list[dict[str, Any]]) -> None:
    print("       MiB  tensors    load GB/s  attach p50 ms  p99 ms  MiB by attach  free before, after")
    for row in rows:
        print(
            f"  {row['bytes'] >> 20:8}  {row['num_tensors']:7}  {row['load_gb_per_s']:11.2f}  {row['p50_ms']:13.2f}  "
            f"{row['p99_ms']:6.2f}  {row['bytes_by_attach'] >> 20:13}  {row['free_before'] >> 20}, "
            f"{row['free_after'] >> 20}"
        )


def _kernels(found: dict[str, Any]) -> None:
    if "not_measured" in found:
        print(f"  {found['not_measured']}")
        for name in found["names"]:
            print(f"  {name:44}  –")
        return
    print(f"  copy {found['copy_gb_per_s']} GB/s, product {found['matmul_tflop_per_s']} TFLOP/s")
    for row in found["kernels"]:
        print(
            f"  {row['kernel']:44}  {row['us']:9.1f} µs  floor {row['floor_us']:9.1f} µs ({row['bound_by']})  "
            f"{row['share_of_floor']:6.1%}  {row['per_s']}"
        )


def _conversion(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        rate = f"{row['s']:8.3f} s  {row['stored_gb_per_s']:6.2f} GB/s of stored bytes"
        print(f"  {row['recipe']:18}  {rate}  {row['said']}")


def _starts(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        seconds = "" if row["first_token_s"] is None else f"  first token after {row['first_token_s']:.3f} s"
        phases = ", ".join(f"{name} {s:.3f}" for name, s in row["phases"].items())
        print(f"  {row['start']}{seconds}\n      {phases}")


_SHOWS: dict[str, Callable[[Any], None]] = {
    "questions": _questions,
    "deaths": _events,
    "holder": _events,
    "attach": _attach,
    "kernels": _kernels,
    "conversion": _conversion,
    "starts": _starts,
}
