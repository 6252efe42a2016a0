"""An engine reduced to its weights: attaches, reads every byte once, says so, and holds on until its stdin ends.

python -m preload.bench.holder RUNTIME_DIR CHECKPOINT MODEL
"""

from __future__ import annotations

import sys

from preload.engine.client import attach
from preload.engine.recipe import Recipe


def main() -> None:
    runtime_dir, checkpoint, model = sys.argv[1:]
    with attach(checkpoint, recipe=Recipe(model=model), runtime_dir=runtime_dir) as attachment:
        for tensor in attachment.tensors.values():
            tensor.view(-1)[::1024].sum()  # a touch of every page is enough, and needs no copy
        print("attached", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
