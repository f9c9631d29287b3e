"""Operations on whole batches; each returns a new, validated batch.

Group, trajectory and tree-token numbers (`group_B`, `trajectory_B`, `node_BT`) are local to a
batch. `concatenate` renumbers them, so that prompts of different batches never share a group.
Splitting by tokens is in `micro_batching`, splitting into optimizer steps in `minibatches`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from mega_agentrl.batch.packing import PAD_NODE_ID
from mega_agentrl.types.batch import TrainBatch

_OPTIONAL_FIELDS = tuple(spec.name for spec in fields(TrainBatch) if spec.default is None)
_TENSOR_FIELDS = tuple(spec.name for spec in fields(TrainBatch) if spec.name != "prompt_ids")
_RENAMABLE_FIELDS = tuple(name for name in _OPTIONAL_FIELDS if name != "trajectory_B")


def select_fields(batch: TrainBatch, names: Iterable[str]) -> TrainBatch:
    """Return the batch with only these of its optional fields.

    Raises:
        ValueError: the batch lacks one of the fields.
    """
    wanted = set(names)
    if unknown := sorted(wanted - set(_present_fields(batch))):
        raise ValueError(
            f"select_fields: {', '.join(unknown)} is not in the batch, expected some of "
            f"{_present_fields(batch)}"
        )
    return batch.with_fields(**dict.fromkeys(set(_OPTIONAL_FIELDS) - wanted)).validate()


def slice_rows(batch: TrainBatch, start: int, stop: int) -> TrainBatch:
    """Return the rows [start, stop).

    Raises:
        ValueError: the range is empty or exceeds the batch.
    """
    if not 0 <= start < stop <= batch.num_rows:
        raise ValueError(
            f"slice_rows: rows {start} to {stop} of a batch of {batch.num_rows}, expected a run of "
            "at least one of its rows"
        )
    return batch.select_rows(range(start, stop))


def concatenate(batches: Sequence[TrainBatch]) -> TrainBatch:
    """Concatenate batches along the rows, padded to the widest and with renumbered ids.

    `trajectory_B` is filled in for batches that lack it if another batch has it.

    Raises:
        ValueError: there is no batch, only some batches have a field, or a field's dtypes differ.
    """
    if not batches:
        raise ValueError("concatenate: got no batch, expected at least one")
    for batch in batches:
        batch.validate()
    if any(batch.trajectory_B is not None for batch in batches):
        batches = [
            batch.with_fields(trajectory_B=torch.arange(batch.num_rows))
            if batch.trajectory_B is None
            else batch
            for batch in batches
        ]
    next_number = dict.fromkeys(("group_B", "node_BT", "trajectory_B"), 0)
    renumbered = []
    for batch in batches:
        changes: dict[str, torch.Tensor] = {}
        for name, first in next_number.items():
            value = getattr(batch, name)
            if value is not None and value.numel():
                changes[name] = torch.where(value >= 0, value + first, value)
                next_number[name] = max(first, int(changes[name].max()) + 1)
        renumbered.append(batch.with_fields(**changes))
    return _concatenate_padded(renumbered, "concatenate")


def union_fields(batch: TrainBatch, other: TrainBatch) -> TrainBatch:
    """Return a batch with the fields of both batches, which must have the same rows.

    Raises:
        ValueError: the prompts differ, or a field that both have has different values.
    """
    if batch.prompt_ids != other.prompt_ids:
        raise ValueError("union_fields: prompt_ids differ, expected two batches of the same rows")
    added: dict[str, Any] = {}
    for name in _present_fields(other):
        own, others = getattr(batch, name), getattr(other, name)
        if own is None:
            added[name] = others
        elif own.shape != others.shape or not torch.allclose(
            own, others, rtol=0, atol=0, equal_nan=True
        ):
            raise ValueError(
                f"union_fields: {name} differs, expected the same values where both have it; "
                "probable "
                "cause: rows in another order, or two steps"
            )
    return batch.with_fields(**added).validate()


def rename_field(batch: TrainBatch, source: str, target: str) -> TrainBatch:
    """Move the optional field `source` to the optional field `target`.

    Raises:
        ValueError: the batch lacks `source` or already has `target`, or one of them is no optional
            field.
    """
    for name, is_there in ((source, True), (target, False)):
        if name not in _RENAMABLE_FIELDS:
            raise ValueError(
                f"rename_field: {name!r}, expected one of {', '.join(_RENAMABLE_FIELDS)}"
            )
        if (getattr(batch, name) is not None) is not is_there:
            raise ValueError(
                f"rename_field: {source} to {target}: {name} is {'not ' * is_there}in the batch, "
                "expected the first to be there and the second not"
            )
    return batch.with_fields(**{target: getattr(batch, source), source: None}).validate()


def repeat(batch: TrainBatch, number: int) -> TrainBatch:
    """Repeat every row `number` times; copies share the group but are separate trajectories."""
    if number < 1:
        raise ValueError(f"repeat: number={number}, expected at least 1")
    copies = batch.select_rows([row for row in range(batch.num_rows) for _ in range(number)])
    if batch.trajectory_B is not None and copies.trajectory_B is not None:
        copy_B = torch.arange(number).repeat(batch.num_rows)
        copies = copies.with_fields(trajectory_B=copies.trajectory_B * number + copy_B)
    return copies.validate()


def pad_response_length(batch: TrainBatch, width: int) -> TrainBatch:
    """Pad the batch to `width` response positions.

    Raises:
        ValueError: the batch is wider already.
    """
    more = width - batch.response_BT.size(1)
    if more < 0:
        raise ValueError(
            f"pad_response_length: width={width}, expected at least {batch.response_BT.size(1)}, "
            "the width "
            "of response_BT"
        )
    return batch.with_fields(
        **{
            name: functional.pad(
                getattr(batch, name), (0, more), value=PAD_NODE_ID if name == "node_BT" else 0
            )
            for name in _present_fields(batch)
            if name.endswith("_BT")
        }
    ).validate()


def pad_rows(batch: TrainBatch, multiple: int) -> TrainBatch:
    """Pad the number of rows to a multiple with masked copies of the last row.

    Each copy has a group and a trajectory of its own and reward 0; `select_rows(range(B))` removes
    the copies again.
    """
    if multiple < 1 or not batch.num_rows:
        raise ValueError(
            f"pad_rows: multiple={multiple} for {batch.num_rows} rows, expected at least one each"
        )
    batch.validate()
    more = -batch.num_rows % multiple
    if not more:
        return batch
    copies = batch.select_rows([batch.num_rows - 1] * more)
    numbers_B = torch.arange(more)
    copies = copies.with_fields(
        mask_BT=torch.zeros_like(copies.mask_BT),
        reward_B=torch.zeros_like(copies.reward_B),
        group_B=numbers_B,
        trajectory_B=None if batch.trajectory_B is None else numbers_B,
    )
    return concatenate([batch, copies])


def chunk(batch: TrainBatch, number: int) -> list[TrainBatch]:
    """Split into `number` runs of consecutive rows whose sizes differ by at most one."""
    if not 1 <= number <= batch.num_rows:
        raise ValueError(f"chunk: number={number}, expected 1 to {batch.num_rows}, a row for each")
    edges = [batch.num_rows * index // number for index in range(number + 1)]
    return [slice_rows(batch, start, stop) for start, stop in pairwise(edges)]


def merge_chunks(
    chunks: Sequence[TrainBatch], rows: Sequence[Sequence[int]] | None = None
) -> TrainBatch:
    """Reassemble a batch from its parts, with the fields that these have now.

    Args:
        chunks: the parts.
        rows: the row numbers of each part; None for the parts of `chunk`.

    Raises:
        ValueError: a row is missing or occurs twice, or the parts have different fields.
    """
    if not chunks:
        raise ValueError("merge_chunks: got no chunk, expected at least one")
    whole = _concatenate_padded(chunks, "merge_chunks")
    if rows is None:
        return whole
    held = [row for part in rows for row in part]
    if [len(part) for part in rows] != [one.num_rows for one in chunks] or sorted(held) != list(
        range(whole.num_rows)
    ):
        raise ValueError(
            f"merge_chunks: rows {[list(part) for part in rows]} of chunks of "
            f"{[one.num_rows for one in chunks]} rows, expected each row of the whole once"
        )
    return whole.select_rows(sorted(range(len(held)), key=held.__getitem__))


def _concatenate_padded(batches: Sequence[TrainBatch], what: str) -> TrainBatch:
    """Concatenate along the rows without renumbering, padded to the widest."""
    names = _present_fields(batches[0])
    for number, batch in enumerate(batches):
        if odd := sorted(set(names) ^ set(_present_fields(batch))):
            raise ValueError(
                f"{what}: {', '.join(odd)} is in batch 0 or in batch {number}, expected it in both "
                "or in neither; probable cause: one of them missed a phase"
            )
        for name in names:
            got, expected = getattr(batch, name).dtype, getattr(batches[0], name).dtype
            if got != expected:
                raise ValueError(f"{what}: {name} of batch {number} is {got}, expected {expected}")
    width = max(batch.response_BT.size(1) for batch in batches)
    wide = [pad_response_length(batch, width) for batch in batches]
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(batch, name) for batch in wide]) for name in names
    }
    return TrainBatch(prompt_ids=sum((one.prompt_ids for one in wide), ()), **tensors).validate()


def _present_fields(batch: TrainBatch) -> list[str]:
    return [name for name in _TENSOR_FIELDS if getattr(batch, name) is not None]
