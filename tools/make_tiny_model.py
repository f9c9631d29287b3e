"""Creates the input of a smoke run: a tiny model and the data of a generated task.

    python tools/make_tiny_model.py --out runs/toolqa --seed 0
    python tools/make_tiny_model.py --out runs/toolqa_chat --task toolqa_chat
    python tools/make_tiny_model.py --out runs/calls --task calls
    python tools/make_tiny_model.py --out runs/orders --task orders
    python tools/make_tiny_model.py --out runs/vision --task vision

A second call with the same settings does nothing. The work is done by `mega_agentrl.data.toolqa`,
`mega_agentrl.data.calls`, `mega_agentrl.data.orders` and `mega_agentrl.data.vision_qa`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mega_agentrl.data.generated.settings import GeneratedTask, TaskSettings, is_written


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder unless it is up to date; return 2 for invalid settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    for spec in fields(TaskSettings):
        flag = "--" + spec.name.replace("_", "-")
        kind: dict[str, Any] = {"type": int}
        if spec.name == "task":
            kind = {"type": GeneratedTask, "choices": list(GeneratedTask)}
        elif spec.name == "blank_images":
            kind = {"action": "store_true"}
        parser.add_argument(flag, default=spec.default, help=f"default {spec.default}", **kind)
    options = vars(parser.parse_args(arguments))
    folder: Path = options.pop("out")
    try:
        settings = TaskSettings(**options)
        if is_written(folder, settings):
            print(f"{folder}: up to date")
            return 0
        _write(folder, settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: written")
    return 0


def _write(folder: Path, settings: TaskSettings) -> None:
    # Imported here: torch and transformers take seconds, which a call without work can save.
    from transformers.utils.logging import disable_progress_bar

    from mega_agentrl.data.calls.dataset_writer import write_calls_dataset
    from mega_agentrl.data.orders.dataset_writer import write_orders_dataset
    from mega_agentrl.data.toolqa.dataset_writer import write_toolqa_dataset
    from mega_agentrl.data.vision_qa.dataset_writer import write_vision_dataset

    disable_progress_bar()
    match settings.task:
        case GeneratedTask.toolqa | GeneratedTask.toolqa_chat:
            write_toolqa_dataset(folder, settings)
        case GeneratedTask.calls:
            write_calls_dataset(folder, settings)
        case GeneratedTask.orders:
            write_orders_dataset(folder, settings)
        case GeneratedTask.vision:
            write_vision_dataset(folder, settings)


if __name__ == "__main__":
    sys.exit(main())
