"""Checkpoint folders: atomic creation, manifest, integrity check, search for the newest, pruning.

    run/step_000120.partial-1f0c/   being written; never read
    run/step_000120/                written, verified, renamed
    run/step_000120/manifest.json   written last; a folder with it is a checkpoint

Every file is flushed to disk before the rename, and the folders after it, so a folder with a
manifest is complete even if a process or host dies at any moment. The manifest lists every file
with its size and SHA-256. `latest_checkpoint` checks sizes only; digests are compared when a
checkpoint is loaded.

A manifest is checked when it is read: a folder with another one is no checkpoint. A checkpoint may
be a link to a folder elsewhere; nothing is ever removed there, only the link.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import parse_json, reading
from mega_agentrl.errors import InputError
from mega_agentrl.types.atomic_file import atomic_write, fsync_path

if TYPE_CHECKING:
    from mega_agentrl.config.sections.policy import LoraConfig
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = "mega_agentrl checkpoint 3"
_FORMATS = re.compile(r"mega_agentrl checkpoint \d+")
MAX_MANIFEST_BYTES = 1 << 28
"""Largest manifest; one with the files of thousands of ranks and the state of a sampler of millions
of rows has a tenth of that."""
_PARTIAL_SUFFIX = ".partial-"
_MAX_COUNT = 1 << 53
"""Above any number of steps, ranks or bytes, and exact in every JSON reader."""
_MAX_NAME_CHARS = 255
_DTYPES = ("float32", "bfloat16", "float16")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_logger = logging.getLogger(__name__)


class CheckpointVersionError(InputError):
    """An intact checkpoint is of another version of this program, which alone can continue it."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Expected size and digest of a file."""

    num_bytes: int
    sha256: str
    """Hexadecimal."""

    def __post_init__(self) -> None:
        _check_count("bytes of a file", self.num_bytes)
        if not _SHA256.fullmatch(self.sha256):
            raise InputError("SHA-256 of a file", self.sha256, "64 hexadecimal digits")

    @classmethod
    def from_file(cls, path: Path) -> FileRecord:
        """Create the record of an existing file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(path.stat().st_size, digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """Description of a checkpoint and its files, stored as JSON."""

    number: int
    """Number of the checkpoint in its run folder, ascending."""
    num_steps: int
    """Position in the learning rate schedule, in optimizer steps."""
    num_adam_steps: int
    """Number of updates of Adam's moments."""
    num_ranks: int
    """Ranks that wrote the checkpoint; other numbers and layouts can load it."""
    layout: dict[str, Any]
    """`ParallelConfig` of the ranks that wrote the checkpoint."""
    dtype: str
    """Training dtype, as in `bfloat16`."""
    shape: dict[str, Any]
    """`ModelShape` of the model."""
    files: dict[str, FileRecord]
    """Every file of the checkpoint except the manifest, by name."""
    extra: dict[str, Any] = field(default_factory=dict)
    """JSON values of the caller of `save_checkpoint`."""
    freeze_vision: bool = False
    """Whether the vision tower was frozen, so that the checkpoint has no moments of it."""
    lora: dict[str, Any] | None = None
    """`lora_record` of the adapters that the checkpoint consists of; None if it has all weights."""

    def __post_init__(self) -> None:
        for name in ("number", "num_steps", "num_adam_steps", "num_ranks"):
            _check_count(name, getattr(self, name))
        if self.dtype not in _DTYPES:
            raise InputError("dtype of a checkpoint", self.dtype, f"one of {', '.join(_DTYPES)}")
        for name in self.files:
            is_plain = Path(name).name == name and name.isprintable()
            is_other = name in ("", "..", MANIFEST_FILE) or len(name) > _MAX_NAME_CHARS
            if is_other or not is_plain:
                expected = "the name of a file in the folder of the checkpoint"
                raise InputError("a file of a checkpoint", name, expected)

    @classmethod
    def read(cls, folder: Path) -> CheckpointManifest:
        """Read the manifest of a folder.

        Raises:
            CheckpointVersionError: If it is a checkpoint of another version.
            ValueError: If the folder is not a finished checkpoint.
        """
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise InputError(
                str(path),
                None,
                "the manifest of a finished checkpoint",
                "an interrupted save, or another kind of folder",
            )
        with reading("checkpoint", path, "the manifest of a finished checkpoint"):
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise ValueError(f"it has more than {MAX_MANIFEST_BYTES} bytes")
            values = dict(parse_json(path.read_bytes(), unique_keys=True))
        got_format = values.pop("format", None)
        if _FORMATS.fullmatch(str(got_format)) and got_format != MANIFEST_FORMAT:
            raise CheckpointVersionError(
                f"format of {path}",
                got_format,
                repr(MANIFEST_FORMAT),
                "a run of another version (format 2: with megatron-core 0.16); continue it with "
                "that version, or export it there (tools/export_hf.py) and start a new run from "
                "the exported weights (resume=false moves this one aside)",
            )
        if got_format != MANIFEST_FORMAT:
            raise InputError(f"format of {path}", got_format, repr(MANIFEST_FORMAT))
        # Imported here, because the tests for GPUs run without msgspec.
        from mega_agentrl.types.serialization import from_builtins

        return from_builtins(cls, values, str(path))

    def require_lora(self, folder: Path, lora: LoraConfig | None) -> None:
        """Raise `ValueError` if the checkpoint in `folder` has other adapters than a run's."""
        got, expected = self.lora, None if lora is None else lora_record(lora)
        if got != expected:
            raise ConfigError(
                "model.lora",
                expected,
                f"{got} to resume checkpoint {folder}",
                "another configuration of the run (start a new one from its exported weights to "
                "train with other adapters)",
            )

    def require_shape(self, folder: Path, shape: ModelShape, source: str) -> None:
        """Raise `ValueError` if the checkpoint in `folder` is of a model of another shape.

        `source` names where the expected shape is from.
        """
        expected = to_json_dict(asdict(shape), "shape")
        got = _with_neutral_values(self.shape, expected)
        if got != expected:
            differing = [name for name in expected if got.get(name) != expected[name]]
            own = {name: expected[name] for name in differing}
            raise InputError(
                f"shape of checkpoint {folder}",
                {name: got.get(name) for name in differing},
                f"{own} of {source}",
                "another model's folder, or a critic's checkpoint",
            )

    def write(self, folder: Path) -> None:
        """Write the manifest atomically, which makes the folder a checkpoint."""
        text = json.dumps({"format": MANIFEST_FORMAT, **asdict(self)}, indent=1)
        atomic_write(folder / MANIFEST_FILE, text, fsync=True)


def _check_count(name: str, value: int) -> None:
    if not 0 <= value <= _MAX_COUNT:
        raise InputError(name, value, f"0 to {_MAX_COUNT}")


def _with_neutral_values(stored: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Return a stored shape with keys that later versions have added, where they say nothing."""
    merged = {name: value for name, value in expected.items() if value in (None, False, [])}
    for name, value in stored.items():
        inner = expected.get(name)
        is_nested = isinstance(value, dict) and isinstance(inner, dict)
        merged[name] = _with_neutral_values(value, inner) if is_nested else value
    return merged


def create_partial_folder(folder: Path, token: str) -> Path:
    """Create the empty folder for a save and remove leftovers of earlier attempts.

    Args:
        folder: The checkpoint's final folder.
        token: Unique to this attempt, so that a writer of an earlier attempt that is still
            alive cannot write into the new folder.

    Raises:
        ValueError: If `folder` is a finished checkpoint or holds unrelated files.
    """
    if (folder / MANIFEST_FILE).is_file():
        raise InputError(
            f"folder of the save {folder}",
            "a finished checkpoint",
            "a free name",
            "a run that was resumed from an older checkpoint",
        )
    is_occupied = folder.is_file() or (folder.is_dir() and any(folder.iterdir()))
    if is_occupied and not (folder / "metadata.json").is_file():
        expected = "a free name or an interrupted save"
        raise InputError(f"folder of the save {folder}", "other files", expected)
    for leftover in folder.parent.glob(f"{folder.name}{_PARTIAL_SUFFIX}*"):
        _try_remove(leftover)
    partial = folder.with_name(f"{folder.name}{_PARTIAL_SUFFIX}{token}")
    partial.mkdir(parents=True)
    return partial


def commit_folder(partial: Path, folder: Path, manifest: CheckpointManifest) -> None:
    """Rename the written folder to its final name and add the manifest.

    Raises:
        ValueError: If a file is missing or has the wrong size.
    """
    damage = find_damage(partial, manifest, manifest.files, contents=False)
    if damage:
        raise damage
    for path in partial.iterdir():
        fsync_path(path)
    fsync_path(partial)
    if os.path.lexists(folder):
        _remove(folder)
    partial.rename(folder)
    fsync_path(folder.parent)
    manifest.write(folder)


def find_damage(
    folder: Path, manifest: CheckpointManifest, names: Iterable[str], *, contents: bool
) -> InputError | None:
    """Return an error about the first of the named files that differs from the manifest, if any.

    Without `contents`, only existence and size are checked, not the digest.
    """
    cause = "a damaged copy, or a full or failing disk"
    for name in names:
        path, expected = folder / name, manifest.files[name]
        size = path.stat().st_size if path.is_file() else None
        if size != expected.num_bytes:
            return InputError(f"bytes of {path}", size, str(expected.num_bytes), cause)
        if contents and (found := FileRecord.from_file(path)) != expected:
            return InputError(f"SHA-256 of {path}", found.sha256, expected.sha256, cause)
    return None


def list_checkpoints(run_folder: Path) -> list[tuple[Path, CheckpointManifest]]:
    """List the intact checkpoints of a run folder, oldest first.

    Raises:
        CheckpointVersionError: If one is of another version, so that none is taken for damaged.
    """
    checkpoints = []
    for path in run_folder.glob(f"*/{MANIFEST_FILE}"):
        if _PARTIAL_SUFFIX in path.parent.name:
            continue
        try:
            manifest = CheckpointManifest.read(path.parent)
        except CheckpointVersionError:
            raise
        except ValueError:
            continue
        if find_damage(path.parent, manifest, manifest.files, contents=False) is None:
            checkpoints.append((path.parent, manifest))
    return sorted(checkpoints, key=lambda entry: (entry[1].number, entry[0].name))


def latest_checkpoint(run_folder: str | Path) -> Path | None:
    """Return the newest intact checkpoint of a run folder, or None."""
    checkpoints = list_checkpoints(Path(run_folder))
    return checkpoints[-1][0] if checkpoints else None


def next_checkpoint_number(run_folder: Path) -> int:
    """Return the number for the next checkpoint of a run folder."""
    return max((manifest.number for _, manifest in list_checkpoints(run_folder)), default=0) + 1


def prune_checkpoints(run_folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` intact checkpoints, and the leftovers of earlier saves.

    No save may be running in the folder. What cannot be removed stays, with a warning; so does a
    file with the name of a leftover. Returns the removed folders and links.
    """
    if keep < 1:
        raise InputError("keep", keep, "at least 1: the newest checkpoint is always kept")
    old = [folder for folder, _ in list_checkpoints(run_folder)[:-keep]]
    return [path for path in (*old, *unfinished_saves(run_folder)) if _try_remove(path)]


def unfinished_saves(run_folder: Path) -> list[Path]:
    """Return the folders of saves that are running or were interrupted."""
    return sorted(run_folder.glob(f"*{_PARTIAL_SUFFIX}*"))


def invalidate_checkpoint(folder: Path) -> None:
    """Make a folder no checkpoint; of a link to a folder elsewhere only the link is removed."""
    if folder.is_symlink():
        folder.unlink()
    else:
        (folder / MANIFEST_FILE).unlink(missing_ok=True)


def _try_remove(path: Path) -> bool:
    """Remove a folder or a link; return whether it was removed, and warn if it cannot be."""
    if not path.is_symlink() and not path.is_dir():
        return False
    try:
        _remove(path)
    except OSError as error:
        _logger.warning("%s cannot be removed: %s", path, error)
        return False
    return True


def _remove(path: Path) -> None:
    """Remove a folder with its contents, or a link without its target."""
    if path.is_symlink():
        path.unlink()
        return
    # Without its manifest the folder is no checkpoint, even if the removal is interrupted.
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    fsync_path(path)
    shutil.rmtree(path)


def lora_record(lora: LoraConfig) -> dict[str, Any]:
    """Return the settings that a checkpoint's adapters depend on."""
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": [str(one) for one in lora.targets]}


def to_json_dict(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the mapping as JSON would read it back; `ValueError` if it is not serialisable."""
    try:
        return dict(json.loads(json.dumps(value, allow_nan=True)))
    except TypeError as error:
        raise InputError(what, error, "plain numbers, strings, lists and maps") from error
