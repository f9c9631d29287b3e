"""Writer of sharded tensors in Megatron's `torch_dist` format, without child processes.

Megatron's save strategy forks writers from a threaded process, receives their results through a
manager process, and hangs if one of them is killed. Here each rank, in any thread, writes its own
file and a report with its plan; rank 0 builds the global metadata from the reports of all ranks.
Plans, items and metadata are those of Megatron and torch, so `dist_checkpointing.load` reads the
result. `checkpoint.save_load` synchronises the ranks, without collectives. The digest of a file is
that of the bytes that were to be written, so that nothing is read back; a load compares it.

The reports are pickled, because torch's plans have no other form, and read by `LimitedUnpickler`,
which calls nothing but the records of such plans. They go from the ranks to rank 0 of one save,
through the folder that rank 0 has created for it under a random name, and are removed before it
becomes a checkpoint: none is ever read from the folder of an earlier run, or of somebody else's.

The private names that are imported from torch are those of the pinned version.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mega_agentrl.actor.checkpoint.checkpoint_dir import FileRecord
from mega_agentrl.actor.checkpoint.torch_dist_reader import LimitedUnpickler
from mega_agentrl.actor.megatron_compat import replace_keys_with_sharded_keys
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    import os
    from collections.abc import Buffer, Callable, Iterator, Mapping
    from typing import IO

    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

_BACKEND, _VERSION = "torch_dist", 1
_METADATA_FILE, _CONFIG_FILE = ".metadata", "metadata.json"
_CHECKPOINT_MODULE = "torch.distributed.checkpoint"
_REPORT_NAMES = frozenset(
    {
        (__name__, "_WriteReport"),
        (FileRecord.__module__, "FileRecord"),
        ("torch.serialization", "_get_layout"),
        (f"{_CHECKPOINT_MODULE}.filesystem", "_StorageInfo"),
        (f"{_CHECKPOINT_MODULE}.filesystem", "_StoragePrefix"),
        (f"{_CHECKPOINT_MODULE}.storage", "WriteResult"),
        *(
            (f"{_CHECKPOINT_MODULE}.planner", name)
            for name in (
                *("BytesIOWriteData", "SavePlan", "TensorWriteData"),
                *("WriteItem", "WriteItemType"),
            )
        ),
        *(
            (f"{_CHECKPOINT_MODULE}.metadata", name)
            for name in (
                *("ChunkStorageMetadata", "MetadataIndex"),
                *("TensorProperties", "_MEM_FORMAT_ENCODING"),
            )
        ),
    }
)
"""Names that a report may refer to, beside dtypes and `torch.Size`."""
_COMMON_STATE = ShardedObject("common_state", {}, (1,), (0,))
"""Megatron's place for values that are not sharded, without which its `load` reads nothing."""


@dataclass(frozen=True, slots=True)
class _WriteReport:
    """Plan, results and files of one rank, from which the global metadata is built."""

    plan: SavePlan
    results: list[WriteResult]
    files: dict[str, FileRecord]


class _DigestStream(io.IOBase):
    """A file opened for writing in sequence, with the size and digest of what was written."""

    def __init__(self, stream: IO[bytes], before_write: Callable[[], None]) -> None:
        self._stream = stream
        self._before_write = before_write
        self._digest = hashlib.sha256()
        self._num_bytes = 0
        self.error: Exception | None = None
        """Why the first write that failed did so."""

    def record(self) -> FileRecord:
        return FileRecord(self._num_bytes, self._digest.hexdigest())

    def write(self, data: Buffer) -> int:
        try:
            self._before_write()
            num_bytes = self._stream.write(data)
        except (OSError, RuntimeError) as error:
            self.error = self.error or error
            raise
        self._digest.update(data)
        self._num_bytes += num_bytes
        return num_bytes

    def tell(self) -> int:
        return self._num_bytes

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()
        super().close()


class _DigestFileSystem(FileSystem):
    """Writes files and keeps their records; calls a function before every write."""

    def __init__(self, before_write: Callable[[], None]) -> None:
        self.records: dict[str, FileRecord] = {}
        self._before_write = before_write

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with Path(path).open(mode) as stream:
            digest_stream = _DigestStream(stream, self._before_write)
            try:
                yield digest_stream
            except RuntimeError as error:
                if digest_stream.error is None:
                    raise
                # `torch.save` has replaced the error of a write by one of its own.
                raise digest_stream.error from error
        self.records[Path(path).name] = digest_stream.record()


def write_rank_file(
    state: dict[str, Any], folder: Path, rank: int, before_write: Callable[[], None] = lambda: None
) -> dict[str, FileRecord]:
    """Write this rank's file, flushed to disk, and its report for `finalize_checkpoint`.

    Args:
        state: Sharded tensors in host memory and objects that this rank writes, under any keys.
        folder: Folder of the checkpoint.
        rank: Global rank.
        before_write: Called before every write; an exception of it ends the writing.

    Returns:
        The record of the file by name.
    """
    if rank == 0:
        state = {**state, _COMMON_STATE.key: _COMMON_STATE}
    by_key, _, _ = replace_keys_with_sharded_keys(state, True)
    planner, writer = _make_planner(mcore_to_pyt_state_dict(by_key)), _make_writer(folder)
    writer.fs = file_system = _DigestFileSystem(before_write)
    writer.set_up_storage_writer(rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(replace(plan, storage_data=_StoragePrefix(f"__{rank}_")))
    results = writer.write_data(plan, planner).wait()
    files = file_system.records
    _report_path(folder, rank).write_bytes(pickle.dumps(_WriteReport(plan, results, files)))
    return files


def finalize_checkpoint(
    folder: Path, num_ranks: int, expected: Mapping[str, tuple[int, ...]]
) -> dict[str, FileRecord]:
    """Combine the files of all ranks into one checkpoint.

    Args:
        folder: Folder with the files and reports of all ranks.
        num_ranks: Number of ranks.
        expected: Full shape of every tensor by key; the parts must cover each element once.

    Returns:
        The records of the files that belong to no rank, by name.

    Raises:
        ValueError: If a tensor ends beyond its file.
    """
    paths = [_report_path(folder, rank) for rank in range(num_ranks)]
    reports = [_read_report(path) for path in paths]
    _, metadata = _make_planner({}).create_global_plan([report.plan for report in reports])
    _check_coverage(folder, metadata, expected)
    for report in reports:
        _check_byte_ranges(folder, report)
    _make_writer(folder).finish(metadata, [report.results for report in reports])
    save_config(CheckpointingConfig(_BACKEND, _VERSION), str(folder))
    for path in paths:
        path.unlink()
    common_files = (_METADATA_FILE, _CONFIG_FILE)
    return {name: FileRecord.from_file(folder / name) for name in common_files}


def _read_report(path: Path) -> _WriteReport:
    """Return the report of a rank.

    Raises:
        ValueError: If the file is something else.
    """
    try:
        report = LimitedUnpickler(path.read_bytes(), _REPORT_NAMES).load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise InputError(f"report {path}", f"{error}", "the report of a rank") from error
    if not isinstance(report, _WriteReport):
        raise InputError(f"report {path}", type(report).__name__, "the report of a rank")
    return report


def _check_coverage(
    folder: Path, metadata: Metadata, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Assert that no element is missing; torch's planner checks that none is written twice."""
    sizes = {
        name: sum(chunk.sizes.numel() for chunk in stored.chunks)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    mismatches = {
        name: (sizes.get(name, 0), prod(expected.get(name, (0,))))
        for name in sizes.keys() | expected.keys()
        if sizes.get(name, 0) != prod(expected.get(name, (0,)))
    }
    assert not mismatches, f"{folder}: elements written and expected: {mismatches}"


def _check_byte_ranges(folder: Path, report: _WriteReport) -> None:
    for result in report.results:
        info = result.storage_data
        size, end = report.files[info.relative_path].num_bytes, info.offset + info.length
        if end > size:
            raise InputError(
                f"last byte of {result.index.fqn} in {folder / info.relative_path}",
                end,
                f"at most {size}",
                "a full or failing disk",
            )


def _make_planner(state: dict[str, Any]) -> MCoreSavePlanner:
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(state, is_coordinator=True)
    return planner


def _make_writer(folder: Path) -> FileSystemWriter:
    # Nothing is copied ahead, because everything is in host memory.
    return FileSystemWriter(
        folder,
        single_file_per_rank=True,
        sync_files=True,
        thread_count=1,
        per_thread_copy_ahead=0,
    )


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"__{rank}_report.pickle"
