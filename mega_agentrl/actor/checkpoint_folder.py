"""A checkpoint on disk: when it counts as one, and which is the newest.

    run/step_000120.partial-1f0c/   being written; never read
    run/step_000120/                written, verified, renamed
    run/step_000120/manifest.json   last of all: with it the folder is a checkpoint

Every file is flushed to disk before the rename and the folders after it, so that whatever
moment a process or host dies, a folder with a manifest is whole. The manifest names every file
with its size and SHA-256. `latest` believes the manifest and the sizes only; contents are
compared where a checkpoint is loaded.

Knows files only: neither torch nor Megatron.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = "mega_agentrl checkpoint 1"
_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be. sha256: in hexadecimal."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Read the file back."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(path.stat().st_size, digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    number: counts the checkpoints of a run folder upwards. num_steps: optimizer steps that the
    learning rate's course has behind it; num_adam_steps: those in the moments. num_ranks, layout,
    dtype: of the ranks that wrote it; another layout may load it. shape: the model's sizes.
    extra: the caller's own.
    """

    number: int
    num_steps: int
    num_adam_steps: int
    num_ranks: int
    layout: dict[str, Any]
    dtype: str
    shape: dict[str, Any]
    files: dict[str, FileRecord]
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises `ValueError` where the folder is no finished checkpoint."""
        path = folder / MANIFEST
        if not path.is_file():
            raise ValueError(
                f"checkpoint {folder}: expected {MANIFEST} in it, found none; probable cause: "
                "the save was cut short, or another kind of folder"
            )
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            kind = values.pop("format")
            files = {name: FileRecord(**record) for name, record in values.pop("files").items()}
            manifest = cls(files=files, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"checkpoint {folder}: {MANIFEST} cannot be read ({error!r}); probable cause: "
                "damaged, or of another version"
            ) from error
        if kind != FORMAT:
            raise ValueError(f"checkpoint {folder}: got format {kind!r}, expected {FORMAT!r}")
        return manifest

    def write(self, folder: Path) -> None:
        """Make the folder a checkpoint."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        temporary = folder / f"{MANIFEST}.tmp"
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        temporary.rename(folder / MANIFEST)
        flush(folder)


def flush(path: Path) -> None:
    """Make a file's contents, or a folder's entries, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def begin(folder: Path, token: str) -> Path:
    """Make the empty folder that is written to; leftovers of the same name are removed.

    token: of this attempt alone, so that a writer of an earlier one that is still alive
    cannot write into it. Raises `ValueError` where there is a finished checkpoint already, or
    something that is none of ours.
    """
    if (folder / MANIFEST).is_file():
        raise ValueError(
            f"save to {folder}: there is a finished checkpoint; expected a free name; probable "
            "cause: a run that was resumed from an older one"
        )
    foreign = folder.is_file() or (folder.is_dir() and any(folder.iterdir()))
    if foreign and not (folder / "metadata.json").is_file():
        raise ValueError(
            f"save to {folder}: expected a free name or a save cut short; got something else"
        )
    for leftover in folder.parent.glob(f"{folder.name}{_PARTIAL}*"):
        shutil.rmtree(leftover)
    partial = folder.with_name(f"{folder.name}{_PARTIAL}{token}")
    partial.mkdir(parents=True)
    return partial


def finish(partial: Path, folder: Path, manifest: Manifest) -> None:
    """Give the written folder its name, then its manifest.

    Raises `ValueError` where a file is not there or not of its size.
    """
    damage = find_damage(partial, manifest, manifest.files, contents=False)
    if damage:
        raise ValueError(f"save to {folder}: {damage}; probable cause: a full or failing disk")
    for path in partial.iterdir():
        flush(path)
    flush(partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    flush(folder.parent)
    manifest.write(folder)


def find_damage(
    folder: Path, manifest: Manifest, names: Iterable[str], *, contents: bool
) -> str | None:
    """The first of the named files that is not as the manifest says, or None.

    contents: read them; else only their sizes are looked at.
    """
    for name in names:
        path, expected = folder / name, manifest.files[name]
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size != expected.num_bytes:
            return f"{path} has {size} bytes, expected {expected.num_bytes}"
        if contents and FileRecord.of(path) != expected:
            return f"{path} has other contents than were written"
    return None


def finished(run_folder: Path) -> list[tuple[Path, Manifest]]:
    """Whole checkpoints in a folder, oldest first; those with damage are passed over."""
    found = []
    for path in run_folder.glob(f"*/{MANIFEST}"):
        if _PARTIAL in path.parent.name:
            continue
        try:
            manifest = Manifest.read(path.parent)
        except ValueError:
            continue
        if find_damage(path.parent, manifest, manifest.files, contents=False) is None:
            found.append((path.parent, manifest))
    return sorted(found, key=lambda entry: (entry[1].number, entry[0].name))


def latest(run_folder: str | Path) -> Path | None:
    """The newest whole checkpoint in a folder, None where there is none."""
    found = finished(Path(run_folder))
    return found[-1][0] if found else None


def next_number(run_folder: Path) -> int:
    """One more than the newest checkpoint's."""
    return max((manifest.number for _, manifest in finished(run_folder)), default=0) + 1


def prune(run_folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` whole checkpoints, and what earlier saves left behind.

    Nothing may be writing in the folder. Returns what was removed.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: expected at least 1; the last one cannot go")
    old = [folder for folder, _ in finished(run_folder)[:-keep]]
    for folder in old:
        # Without a manifest it is no checkpoint, however far the removal gets.
        (folder / MANIFEST).unlink()
        flush(folder)
    removed = [*old, *run_folder.glob(f"*{_PARTIAL}*")]
    for folder in removed:
        shutil.rmtree(folder)
    return removed


def as_json(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The mapping as it will be read back. Raises `ValueError` where JSON cannot hold it."""
    try:
        return dict(json.loads(json.dumps(value, allow_nan=True)))
    except TypeError as error:
        raise ValueError(f"{what}: expected plain numbers, strings, lists and maps: {error}") from (
            error
        )
