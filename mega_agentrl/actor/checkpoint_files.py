"""Writes sharded tensors in Megatron's `torch_dist` format, without a process of its own.

Megatron's save strategy forks writers inside a threaded process, takes their results through a
manager process, and waits for ever if one of them is killed. Here each rank writes its one file
itself, in whichever thread it likes, and leaves a report beside it; rank 0 makes the global
metadata from the reports when all have done so. Plans, items and metadata are Megatron's and
torch's own, and `dist_checkpointing.load` reads the result.

No collectives: who waits for whom is `roll_call`'s business.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import (
    COMMON_STATE_FNAME,
    TorchCommonSaveStrategy,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mega_agentrl.actor.checkpoint_folder import FileRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

_BACKEND, _VERSION = "torch_dist", 1
_METADATA, _CONFIG = ".metadata", "metadata.json"


@dataclass(frozen=True, slots=True)
class _Report:
    plan: SavePlan
    results: list[WriteResult]
    files: dict[str, FileRecord]


def write_share(state: dict[str, Any], folder: Path, rank: int) -> None:
    """Write this rank's file, flushed to disk and read back, and its report."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(state, True)
    planner, writer = _planner(mcore_to_pyt_state_dict(by_key)), _writer(folder)
    writer.set_up_storage_writer(rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(replace(plan, storage_data=_StoragePrefix(f"__{rank}_")))
    results = writer.write_data(plan, planner).wait()
    names = {result.storage_data.relative_path for result in results}
    files = {name: FileRecord.of(folder / name) for name in names}
    _report_path(folder, rank).write_bytes(pickle.dumps(_Report(plan, results, files)))


def assemble(
    folder: Path, num_ranks: int, expected: Mapping[str, tuple[int, ...]]
) -> dict[str, FileRecord]:
    """Turn the ranks' files into one checkpoint; every file by name, as it must be.

    expected: full shape of every tensor by key; the pieces must cover each element once.
    Raises `ValueError` where one lies outside of its file.
    """
    paths = [_report_path(folder, rank) for rank in range(num_ranks)]
    reports: list[_Report] = [pickle.loads(path.read_bytes()) for path in paths]
    _, metadata = _planner({}).create_global_plan([report.plan for report in reports])
    _check_cover(folder, metadata, expected)
    _writer(folder).finish(metadata, [report.results for report in reports])
    TorchCommonSaveStrategy(_BACKEND, _VERSION).save_common({}, folder)
    save_config(CheckpointingConfig(_BACKEND, _VERSION), str(folder))
    files = {name: record for report in reports for name, record in report.files.items()}
    _check_places(folder, files)
    for path in paths:
        path.unlink()
    own = (_METADATA, _CONFIG, COMMON_STATE_FNAME)
    return files | {name: FileRecord.of(folder / name) for name in own}


def _check_cover(folder: Path, metadata: Metadata, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Every element is there; that none is there twice has been checked by torch."""
    sizes = {
        name: sum(chunk.sizes.numel() for chunk in stored.chunks)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    wrong = {
        name: (sizes.get(name, 0), prod(expected.get(name, (0,))))
        for name in sizes.keys() | expected.keys()
        if sizes.get(name, 0) != prod(expected.get(name, (0,)))
    }
    assert not wrong, f"{folder}: elements written and expected: {wrong}"


def _check_places(folder: Path, files: dict[str, FileRecord]) -> None:
    for index, place in FileSystemReader(folder).read_metadata().storage_data.items():
        size = files[place.relative_path].num_bytes
        if place.offset + place.length > size:
            raise ValueError(
                f"{folder / place.relative_path}: {index.fqn} ends at byte "
                f"{place.offset + place.length}, expected at most {size}; probable cause: a full "
                "or failing disk"
            )


def _planner(state: dict[str, Any]) -> MCoreSavePlanner:
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(state, is_coordinator=True)
    return planner


def _writer(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"__{rank}_report.pickle"
