"""Makes the smoke run's input: a tiny Qwen3, the tool-QA datasets and the knowledge base.

`python tools/make_tiny_model.py --out runs/toolqa --seed 0`. A second run with the same
settings does nothing. All of the work is in `mega_agentrl.data.toolqa`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from mega_agentrl.data.toolqa.settings import TaskSettings, is_written


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, write, say what happened; 2 for settings that cannot be met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    for spec in fields(TaskSettings):
        flag = "--" + spec.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=spec.default, help=f"default {spec.default}")
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
    # Imported here because torch and transformers take seconds that a second run need not pay.
    from transformers.utils.logging import disable_progress_bar

    from mega_agentrl.data.toolqa.files import write_task

    disable_progress_bar()
    write_task(folder, settings)


if __name__ == "__main__":
    sys.exit(main())
