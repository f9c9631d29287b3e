"""Creates the input of the smoke run: a tiny Qwen3, the tool-QA datasets and the knowledge base.

    python tools/make_tiny_model.py --out runs/toolqa --seed 0

A second call with the same settings does nothing. The work is done by `mega_agentrl.data.toolqa`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from mega_agentrl.data.toolqa.settings import ToolQASettings, is_written


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder unless it is up to date; return 2 for invalid settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    for spec in fields(ToolQASettings):
        flag = "--" + spec.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=spec.default, help=f"default {spec.default}")
    options = vars(parser.parse_args(arguments))
    folder: Path = options.pop("out")
    try:
        settings = ToolQASettings(**options)
        if is_written(folder, settings):
            print(f"{folder}: up to date")
            return 0
        _write(folder, settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: written")
    return 0


def _write(folder: Path, settings: ToolQASettings) -> None:
    # Imported here: torch and transformers take seconds, which a call without work can save.
    from transformers.utils.logging import disable_progress_bar

    from mega_agentrl.data.toolqa.dataset_writer import write_toolqa_dataset

    disable_progress_bar()
    write_toolqa_dataset(folder, settings)


if __name__ == "__main__":
    sys.exit(main())
