"""Reading and writing of Hugging Face checkpoint folders.

A rank opens the safetensors files (one, or several with an index) and reads only the rectangles
that its layout names. For writing, every rank computes the same plan of which tensor goes into
which file, and `actor.checkpoint.hf_export` gathers the tensors. The folder is written under a
temporary name and renamed when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import read_json, reading
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.model_mapping import HF_LM_HEAD

if TYPE_CHECKING:
    import torch

    from mega_agentrl.reshard.layout import ShardLayout

INDEX_FILE_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"
_WEIGHTS = "a complete safetensors file"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def find_tensor_files(folder: str | Path) -> dict[str, Path]:
    """Return the file of each tensor in a checkpoint folder.

    Raises:
        ValueError: If there are no safetensors files, or the index names a missing file.
    """
    folder = Path(folder)
    index, single = folder / INDEX_FILE_NAME, folder / SINGLE_FILE_NAME
    if index.is_file():
        expected = "the index of a Hugging Face checkpoint, with a weight_map"
        weight_map = read_json(index, "model.path", expected)
        with reading("model.path", index, expected):
            files = {name: folder / file for name, file in weight_map["weight_map"].items()}
        missing = sorted({file.name for file in files.values() if not file.is_file()})
        if missing:
            name = f"model.path={folder}, missing files that {INDEX_FILE_NAME} names"
            raise InputError(name, missing, "none", "an unfinished download or copy")
        return files
    if not single.is_file():
        expected = f"a folder with {SINGLE_FILE_NAME} or {INDEX_FILE_NAME}"
        raise ConfigError("model.path", folder, expected, "a checkpoint in another format")
    with reading("model.path", single, _WEIGHTS), safe_open(single, framework="pt") as file:
        return {name: single for name in file.keys()}


def read_shards(
    folder: str | Path,
    layout: Iterable[ShardLayout],
    hf_shapes: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, torch.Tensor],
    *,
    fresh: Collection[str] = (),
) -> None:
    """Fill a rank's parameters from a checkpoint; padding becomes 0.

    Args:
        folder: Checkpoint folder.
        layout: Shards of the rank.
        hf_shapes: Shapes that the mapping expects.
        parameters: Parameters by Megatron name, written in place.
        fresh: Tensors that the folder may lack, such as the scalar head of a critic that
            starts from a policy; the parameters of missing tensors keep their values.

    Raises:
        ValueError: If tensors are unknown, missing or of another shape.
    """
    files, stored_name = _find_tensors(folder, hf_shapes)
    absent = set(fresh) - set(files)
    _check_tensor_names(folder, files, set(hf_shapes) - absent)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for shard in layout:
            if any(block.hf_name in absent for block in shard.blocks):
                continue
            target = parameters[shard.name].detach()
            if sum(block.local_rect.numel for block in shard.blocks) < prod(shard.shape):
                target.zero_()
            for block in shard.blocks:
                path = files[block.hf_name]
                if path not in opened:
                    with reading("model.path", path, _WEIGHTS):
                        opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                view = opened[path].get_slice(stored_name[block.hf_name])
                got, expected = tuple(view.get_shape()), hf_shapes[block.hf_name]
                if got != expected:
                    cause = "config and weights of different models"
                    name = f"{path}, shape of {block.hf_name}"
                    raise InputError(name, got, f"{expected} from config.json", cause)
                target[block.local_rect.slices].copy_(view[block.hf_rect.slices])


def _find_tensors(
    folder: str | Path, hf_shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the file of each tensor and its name there, by the names that the mapping expects.

    Versions of transformers write a vision-language model's tensors under different names: with or
    without `language_model.`, and `visual.` with or without `model.` before it.
    """
    expected_name = {_short_name(name): name for name in hf_shapes}
    files, stored_name = {}, {}
    for stored, file in find_tensor_files(folder).items():
        name = expected_name.get(_short_name(stored), stored)
        files[name], stored_name[name] = file, stored
    return files, stored_name


def _short_name(name: str) -> str:
    """Return a tensor's name without the parts that versions of transformers add or leave out."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.")


def _check_tensor_names(
    folder: str | Path, names: Collection[str], expected: Collection[str]
) -> None:
    unknown = sorted(name for name in set(names) - set(expected) if not _is_ignorable(name))
    missing = sorted(set(expected) - set(names))
    if unknown or missing:
        got = {"unknown tensors": unknown, "missing tensors": missing}
        cause = "weights of another architecture"
        raise InputError(f"model.path={folder}", got, "the tensors of the model", cause)


def _is_ignorable(name: str) -> bool:
    # A tied model's checkpoint may contain a copy of the embedding as its output layer, which a
    # scalar head replaces; old Llama checkpoints contain the rotary frequencies.
    return name == HF_LM_HEAD or name.endswith(".rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One weight file of an export."""

    name: str
    """File name."""
    stage: int
    """Pipeline stage that writes the file."""
    tensors: tuple[str, ...]
    """Tensor names, in order."""


def plan_files(
    stages: Sequence[Sequence[str]],
    hf_shapes: Mapping[str, tuple[int, ...]],
    *,
    element_bytes: int,
    max_file_bytes: int,
) -> list[FilePlan]:
    """Assign tensors to the files of an export.

    A file holds tensors of one stage and at most `max_file_bytes`, unless it is a single tensor.

    Args:
        stages: Names of the tensors that each pipeline stage writes, in order.
        hf_shapes: Full shape by name.
        element_bytes: Bytes per element.
        max_file_bytes: Maximum file size.
    """
    files: list[tuple[int, list[str]]] = []
    for stage, names in enumerate(stages):
        size = 0
        for position, name in enumerate(names):
            num_bytes = prod(hf_shapes[name]) * element_bytes
            if position == 0 or size + num_bytes > max_file_bytes:
                files.append((stage, []))
                size = 0
            files[-1][1].append(name)
            size += num_bytes
    if len(files) == 1:
        return [FilePlan(name=SINGLE_FILE_NAME, stage=files[0][0], tensors=tuple(files[0][1]))]
    return [
        FilePlan(
            name=f"model-{number:05d}-of-{len(files):05d}.safetensors",
            stage=stage,
            tensors=tuple(names),
        )
        for number, (stage, names) in enumerate(files, start=1)
    ]


def begin_export(target: Path, source: Path) -> None:
    """Create the temporary folder with all files of the source folder except its weights.

    Raises:
        ValueError: If the target exists and is not a checkpoint, since it would be replaced.
    """
    if target.exists() and not (target / "config.json").is_file():
        expected = "a path that does not exist, or an old checkpoint to replace"
        raise InputError(f"export to {target}", "a file or folder without config.json", expected)
    partial = partial_export_folder(target)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(file, partial / file.name)


def finish_export(
    target: Path,
    plan: Sequence[FilePlan],
    hf_shapes: Mapping[str, tuple[int, ...]],
    *,
    element_bytes: int,
) -> None:
    """Write the index if there are several files, then rename the folder to `target`."""
    partial = partial_export_folder(target)
    if len(plan) > 1:
        names = [name for file in plan for name in file.tensors]
        total = sum(prod(hf_shapes[name]) for name in names) * element_bytes
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file.name for file in plan for name in file.tensors},
        }
        text = json.dumps(index, indent=2)
        (partial / INDEX_FILE_NAME).write_text(text, encoding="utf-8")
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)


def partial_export_folder(target: Path) -> Path:
    """Return the temporary folder of an export."""
    return target.with_name(f"{target.name}.partial")
