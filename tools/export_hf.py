"""Converts a training checkpoint to a Hugging Face folder that transformers and vLLM load.

    python tools/export_hf.py CHECKPOINT --model FOLDER --out FOLDER [--adapter]

CHECKPOINT is a checkpoint folder (with a manifest.json) of any parallel layout, or a run folder,
whose newest checkpoint is taken; `--model` is the folder that training started from. Adapters
(`model.lora`) are merged into its weights; `--adapter` writes them alone, as a PEFT folder. It
needs one process and no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mega_agentrl.actor.checkpoint.checkpoint_dir import MANIFEST_FILE, latest_checkpoint
from mega_agentrl.config.enums import Dtype
from mega_agentrl.errors import InputError
from mega_agentrl.train.resume.run_dir import CHECKPOINTS_DIR


def main(arguments: Sequence[str] | None = None) -> int:
    """Export the checkpoint; return 2 if there is none or it does not match the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path, help="checkpoint, or run folder with some")
    parser.add_argument("--model", type=Path, required=True, help="folder training started from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=[str(choice) for choice in Dtype],
        default=str(Dtype.auto),
        help="dtype of the written weights; auto: as trained",
    )
    parser.add_argument("--adapter", action="store_true", help="write a PEFT folder of adapters")
    args = parser.parse_args(arguments)
    try:
        checkpoint = _checkpoint(args.checkpoint)
        if args.adapter:
            _write_adapter(checkpoint, args.model, args.out)
        else:
            _write(checkpoint, args.model, args.out, Dtype(args.dtype))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: written from {checkpoint}")
    return 0


def _checkpoint(folder: Path) -> Path:
    if (folder / MANIFEST_FILE).is_file():
        return folder
    for parent in (folder / CHECKPOINTS_DIR, folder):
        if (newest := latest_checkpoint(parent)) is not None:
            return newest
    raise InputError(str(folder), "no complete checkpoint", "a checkpoint or a run folder")


def _write(checkpoint: Path, model: Path, target: Path, dtype: Dtype) -> None:
    # Imported here: Megatron takes seconds to import, too long to report a wrong path.
    import torch

    from mega_agentrl.actor.checkpoint.hf_export import convert_checkpoint_to_hf

    chosen = None if dtype is Dtype.auto else getattr(torch, dtype)
    convert_checkpoint_to_hf(checkpoint, model, target, dtype=chosen)


def _write_adapter(checkpoint: Path, model: Path, target: Path) -> None:
    from mega_agentrl.actor.checkpoint.peft_folder import convert_checkpoint_to_peft

    convert_checkpoint_to_peft(checkpoint, model, target)


if __name__ == "__main__":
    sys.exit(main())
