"""Writer of sharded tensors in Megatron's `torch_dist` format, without child processes.

Megatron's save strategy forks writers from a threaded process, receives their results through a
manager process, and hangs if one of them is killed. Here each rank, in any thread, writes its own
file and a report with its plan; rank 0 builds the global metadata from the reports of all ranks.
Plans, items and metadata are those of Megatron and torch, so `dist_checkpointing.load` reads the
result. The ranks are synchronised by `checkpoint.save_barrier`, without collectives.

The reports are pickled, because torch's plans have no other form, and read by `LimitedUnpickler`,
which calls nothing but the records of such plans. They go from the ranks to rank 0 of one save,
through the folder that rank 0 has created for it under a random name, and are removed before it
becomes a checkpoint: none is ever read from the folder of an earlier run, or of somebody else's.

The private names that are imported from torch are those of the pinned version.
"""

from __future__ import annotations

import pickle
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
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mega_agentrl.actor.checkpoint.checkpoint_dir import FileRecord
from mega_agentrl.actor.checkpoint.torch_dist_reader import LimitedUnpickler
from mega_agentrl.actor.megatron_compat import replace_keys_with_sharded_keys
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def write_rank_file(state: dict[str, Any], folder: Path, rank: int) -> None:
    """Write this rank's file and its report for `finalize_checkpoint`.

    The file is flushed to disk and read back for its digest.

    Args:
        state: Sharded tensors and objects that this rank writes, under any keys.
        folder: Folder of the checkpoint.
        rank: Global rank.
    """
    if rank == 0:
        state = {**state, _COMMON_STATE.key: _COMMON_STATE}
    by_key, _, _ = replace_keys_with_sharded_keys(state, True)
    planner, writer = _make_planner(mcore_to_pyt_state_dict(by_key)), _make_writer(folder)
    writer.set_up_storage_writer(rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(replace(plan, storage_data=_StoragePrefix(f"__{rank}_")))
    results = writer.write_data(plan, planner).wait()
    names = {result.storage_data.relative_path for result in results}
    files = {name: FileRecord.from_file(folder / name) for name in names}
    _report_path(folder, rank).write_bytes(pickle.dumps(_WriteReport(plan, results, files)))


def finalize_checkpoint(
    folder: Path, num_ranks: int, expected: Mapping[str, tuple[int, ...]]
) -> dict[str, FileRecord]:
    """Combine the files of all ranks into one checkpoint.

    Args:
        folder: Folder with the files and reports of all ranks.
        num_ranks: Number of ranks.
        expected: Full shape of every tensor by key; the parts must cover each element once.

    Returns:
        The record of every file by name.

    Raises:
        ValueError: If a tensor ends beyond its file.
    """
    paths = [_report_path(folder, rank) for rank in range(num_ranks)]
    reports = [_read_report(path) for path in paths]
    _, metadata = _make_planner({}).create_global_plan([report.plan for report in reports])
    _check_coverage(folder, metadata, expected)
    _make_writer(folder).finish(metadata, [report.results for report in reports])
    save_config(CheckpointingConfig(_BACKEND, _VERSION), str(folder))
    files = {name: record for report in reports for name, record in report.files.items()}
    _check_byte_ranges(folder, files)
    for path in paths:
        path.unlink()
    common_files = (_METADATA_FILE, _CONFIG_FILE)
    return files | {name: FileRecord.from_file(folder / name) for name in common_files}


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


def _check_byte_ranges(folder: Path, files: dict[str, FileRecord]) -> None:
    for index, info in FileSystemReader(folder).read_metadata().storage_data.items():
        size, end = files[info.relative_path].num_bytes, info.offset + info.length
        if end > size:
            raise InputError(
                f"last byte of {index.fqn} in {folder / info.relative_path}",
                end,
                f"at most {size}",
                "a full or failing disk",
            )


def _make_planner(state: dict[str, Any]) -> MCoreSavePlanner:
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(state, is_coordinator=True)
    return planner


def _make_writer(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"__{rank}_report.pickle"
