"""Files here run in processes of their own: see test_triton_interpreter.py."""

from __future__ import annotations

from preload.bench.interpreter import repair

repair()
