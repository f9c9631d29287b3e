"""Turns a training checkpoint into a Hugging Face folder that transformers and vLLM load.

`python tools/export_hf.py CHECKPOINT --model FOLDER --out FOLDER`: CHECKPOINT is a folder with a
manifest.json, of any layout, or a run's folder, whose newest checkpoint is taken; `--model` the
folder that training started from. One process, no GPU. All of the work is in
`mega_agentrl.actor.convert`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mega_agentrl.actor.checkpoint_folder import MANIFEST, latest
from mega_agentrl.config.choices import Dtype


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, write, say what happened; 2 for a checkpoint or model that does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path, help="checkpoint, or run folder with some")
    parser.add_argument("--model", type=Path, required=True, help="folder training started from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=[str(choice) for choice in Dtype],
        default=str(Dtype.auto),
        help="of the weights written; auto: as trained",
    )
    options = parser.parse_args(arguments)
    try:
        checkpoint = _checkpoint(options.checkpoint)
        _write(checkpoint, options.model, options.out, Dtype(options.dtype))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: written from {checkpoint}")
    return 0


def _checkpoint(folder: Path) -> Path:
    if (folder / MANIFEST).is_file():
        return folder
    newest = latest(folder)
    if newest is None:
        raise ValueError(
            f"{folder}: expected a checkpoint or a folder of checkpoints, found no whole one"
        )
    return newest


def _write(checkpoint: Path, model: Path, target: Path, dtype: Dtype) -> None:
    # Imported here because Megatron takes seconds that a wrong path need not pay.
    import torch

    from mega_agentrl.actor.convert import checkpoint_to_hf

    chosen = None if dtype is Dtype.auto else getattr(torch, dtype)
    checkpoint_to_hf(checkpoint, model, target, dtype=chosen)


if __name__ == "__main__":
    sys.exit(main())
