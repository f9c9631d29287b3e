"""Whole batches taken apart and put together: a new batch each time, checked each time.

    keep(batch, names)          without the other optional fields
    batch.select(rows)          these rows, in this order; `between` for a run of them
    concatenate(batches)        one below the other, as different prompts and trajectories
    join(batch, other)          the optional fields of two batches over the same rows
    move(batch, source, target) a field under another name
    repeat(batch, number)       every row several times
    pad_width, pad_rows         more positions, or rows that count for nothing
    chunk(batch, number)        runs of rows of about equal size, and
    gather(chunks)              back again

What numbers mean in one batch (`group_B`, `owner_B`, `node_BT`) they mean in that batch only: what
comes from another one is numbered on from there, so that two prompts never become one group.
Nothing here cuts by tokens (`balance`) or for optimizer steps (`minibatch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from mega_agentrl.batch.pack import PAD_NODE
from mega_agentrl.types.batch import TrainBatch

_INTEGERS = ("response_BT", "length_B", "group_B", "node_BT", "version_BT", "owner_B")
_OPTIONAL = tuple(spec.name for spec in fields(TrainBatch) if spec.default is None)
_TENSORS = tuple(spec.name for spec in fields(TrainBatch) if spec.name != "prompt_ids")
_MOVABLE = tuple(name for name in _OPTIONAL if name != "owner_B")


def check(batch: TrainBatch) -> TrainBatch:
    """The batch itself; its shapes were checked when it was made.

    Raises ValueError naming the first field of another dtype, a length beyond the positions, a
    token to train on behind its row's end, or a trajectory (`owner_B`) of two groups.
    """
    for name in _present(batch):
        dtype = getattr(batch, name).dtype
        is_right = (
            dtype == torch.bool
            if name == "mask_BT"
            else dtype == torch.int64
            if name in _INTEGERS
            else dtype.is_floating_point
        )
        if not is_right:
            raise ValueError(f"TrainBatch: {name} is {dtype}, expected {_expected(name)}")
    width = batch.response_BT.size(1)
    length_B = batch.length_B
    if bool(((length_B < 0) | (length_B > width)).any()):
        raise ValueError(
            f"TrainBatch: length_B has {length_B.tolist()}, expected 0 to {width}, the width of "
            "response_BT; probable cause: rows of another batch"
        )
    behind_BT = torch.arange(width)[None, :] >= length_B[:, None].cpu()
    if bool((batch.mask_BT.cpu() & behind_BT).any()):
        raise ValueError(
            "TrainBatch: mask_BT has tokens to train on behind length_B, expected none in the "
            "padding; probable cause: a mask of another batch"
        )
    if batch.owner_B is not None:
        _check_owners(batch.owner_B.tolist(), batch.group_B.tolist())
    return batch


def keep(batch: TrainBatch, names: Iterable[str]) -> TrainBatch:
    """The batch with only these of its optional fields; ValueError for one it does not have."""
    wanted = set(names)
    if unknown := sorted(wanted - set(_present(batch))):
        raise ValueError(
            f"keep: {', '.join(unknown)} is not in the batch, expected some of {_present(batch)}"
        )
    return check(batch.with_fields(**dict.fromkeys(set(_OPTIONAL) - wanted)))


def between(batch: TrainBatch, start: int, stop: int) -> TrainBatch:
    """Rows start to stop - 1; ValueError where they are not all there, or there is none."""
    if not 0 <= start < stop <= batch.num_rows:
        raise ValueError(
            f"between: rows {start} to {stop} of a batch of {batch.num_rows}, expected a run of "
            "at least one of its rows"
        )
    return check(batch.select(range(start, stop)))


def concatenate(batches: Sequence[TrainBatch]) -> TrainBatch:
    """One below the other, padded to the widest; the numbers of each go on behind the last one's.

    Raises ValueError for no batch, and for a field that only some have or that changes its dtype;
    `owner_B` is filled in where it is missing.
    """
    if not batches:
        raise ValueError("concatenate: got no batch, expected at least one")
    for batch in batches:
        check(batch)
    if any(batch.owner_B is not None for batch in batches):
        batches = [
            batch.with_fields(owner_B=torch.arange(batch.num_rows))
            if batch.owner_B is None
            else batch
            for batch in batches
        ]
    next_number = dict.fromkeys(("group_B", "node_BT", "owner_B"), 0)
    renumbered = []
    for batch in batches:
        changes: dict[str, torch.Tensor] = {}
        for name, first in next_number.items():
            value = getattr(batch, name)
            if value is not None and value.numel():
                changes[name] = torch.where(value >= 0, value + first, value)
                next_number[name] = max(first, int(changes[name].max()) + 1)
        renumbered.append(batch.with_fields(**changes))
    return _stack(renumbered, "concatenate")


def join(batch: TrainBatch, other: TrainBatch) -> TrainBatch:
    """The fields of both, which are about the same rows.

    Raises ValueError naming a field that both have with different values.
    """
    if batch.prompt_ids != other.prompt_ids:
        raise ValueError("join: prompt_ids differ, expected two batches of the same rows")
    added: dict[str, Any] = {}
    for name in _present(other):
        mine, theirs = getattr(batch, name), getattr(other, name)
        if mine is None:
            added[name] = theirs
        elif mine.shape != theirs.shape or not torch.allclose(
            mine, theirs, rtol=0, atol=0, equal_nan=True
        ):
            raise ValueError(
                f"join: {name} differs, expected the same values where both have it; probable "
                "cause: rows in another order, or two steps"
            )
    return check(batch.with_fields(**added))


def move(batch: TrainBatch, source: str, target: str) -> TrainBatch:
    """An optional field under another name, its own one empty.

    Names are those of `TrainBatch`: there are no others to invent. Raises ValueError where
    `source` is not there, or `target` is, or either is not optional and [B, T].
    """
    for name, is_there in ((source, True), (target, False)):
        if name not in _MOVABLE:
            raise ValueError(f"move: {name!r}, expected one of {', '.join(_MOVABLE)}")
        if (getattr(batch, name) is not None) is not is_there:
            raise ValueError(
                f"move of {source} to {target}: {name} is {'not ' * is_there}in the batch, "
                "expected the first to be there and the second not"
            )
    return check(batch.with_fields(**{target: getattr(batch, source), source: None}))


def repeat(batch: TrainBatch, number: int) -> TrainBatch:
    """Every row `number` times, copies side by side: the same group, trajectories of their own."""
    if number < 1:
        raise ValueError(f"repeat: number={number}, expected at least 1")
    copies = batch.select([row for row in range(batch.num_rows) for _ in range(number)])
    if batch.owner_B is not None and copies.owner_B is not None:
        copy_B = torch.arange(number).repeat(batch.num_rows)
        copies = copies.with_fields(owner_B=copies.owner_B * number + copy_B)
    return check(copies)


def pad_width(batch: TrainBatch, width: int) -> TrainBatch:
    """The batch with T = width; new positions are padding. ValueError for fewer than it has."""
    more = width - batch.response_BT.size(1)
    if more < 0:
        raise ValueError(
            f"pad_width: width={width}, expected at least {batch.response_BT.size(1)}, the width "
            "of response_BT"
        )
    return check(
        batch.with_fields(
            **{
                name: functional.pad(
                    getattr(batch, name), (0, more), value=PAD_NODE if name == "node_BT" else 0
                )
                for name in _present(batch)
                if name.endswith("_BT")
            }
        )
    )


def pad_rows(batch: TrainBatch, multiple: int) -> TrainBatch:
    """The batch with copies of its last row up to a multiple of rows, none of them trained on.

    Each is a group and a trajectory of its own, without reward; `select(range(B))` takes them off.
    """
    if multiple < 1 or not batch.num_rows:
        raise ValueError(
            f"pad_rows: multiple={multiple} for {batch.num_rows} rows, expected at least one each"
        )
    check(batch)
    more = -batch.num_rows % multiple
    if not more:
        return batch
    copies = batch.select([batch.num_rows - 1] * more)
    numbers_B = torch.arange(more)
    copies = copies.with_fields(
        mask_BT=torch.zeros_like(copies.mask_BT),
        reward_B=torch.zeros_like(copies.reward_B),
        group_B=numbers_B,
        owner_B=None if batch.owner_B is None else numbers_B,
    )
    return concatenate([batch, copies])


def chunk(batch: TrainBatch, number: int) -> list[TrainBatch]:
    """`number` runs of rows in order; sizes differ by one at most, the numbers stay."""
    if not 1 <= number <= batch.num_rows:
        raise ValueError(f"chunk: number={number}, expected 1 to {batch.num_rows}, a row for each")
    edges = [batch.num_rows * index // number for index in range(number + 1)]
    return [between(batch, start, stop) for start, stop in pairwise(edges)]


def gather(chunks: Sequence[TrainBatch], rows: Sequence[Sequence[int]] | None = None) -> TrainBatch:
    """The batch that was taken apart, with the fields its parts have by now.

    rows: of each part, the rows it holds; None for those of `chunk`. Raises ValueError where a
    row is missing or comes twice, and as `concatenate` does.
    """
    if not chunks:
        raise ValueError("gather: got no chunk, expected at least one")
    whole = _stack(chunks, "gather")
    if rows is None:
        return whole
    held = [row for part in rows for row in part]
    if [len(part) for part in rows] != [one.num_rows for one in chunks] or sorted(held) != list(
        range(whole.num_rows)
    ):
        raise ValueError(
            f"gather: rows {[list(part) for part in rows]} of chunks of "
            f"{[one.num_rows for one in chunks]} rows, expected each row of the whole once"
        )
    return check(whole.select(sorted(range(len(held)), key=held.__getitem__)))


def _stack(batches: Sequence[TrainBatch], what: str) -> TrainBatch:
    """One below the other as they are, padded to the widest."""
    names = _present(batches[0])
    for number, batch in enumerate(batches):
        if odd := sorted(set(names) ^ set(_present(batch))):
            raise ValueError(
                f"{what}: {', '.join(odd)} is in batch 0 or in batch {number}, expected it in both "
                "or in neither; probable cause: one of them missed a phase"
            )
        for name in names:
            got, expected = getattr(batch, name).dtype, getattr(batches[0], name).dtype
            if got != expected:
                raise ValueError(f"{what}: {name} of batch {number} is {got}, expected {expected}")
    width = max(batch.response_BT.size(1) for batch in batches)
    wide = [pad_width(batch, width) for batch in batches]
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(batch, name) for batch in wide]) for name in names
    }
    return check(TrainBatch(prompt_ids=sum((one.prompt_ids for one in wide), ()), **tensors))


def _present(batch: TrainBatch) -> list[str]:
    return [name for name in _TENSORS if getattr(batch, name) is not None]


def _expected(name: str) -> str:
    return (
        "torch.bool"
        if name == "mask_BT"
        else "torch.int64"
        if name in _INTEGERS
        else "a floating dtype"
    )


def _check_owners(owners: Sequence[int], groups: Sequence[int]) -> None:
    group_of: dict[int, int] = {}
    for row, (owner, group) in enumerate(zip(owners, groups, strict=True)):
        if owner < 0 or group_of.setdefault(owner, group) != group:
            raise ValueError(
                f"TrainBatch: owner_B has {owner} in row {row} of group_B {group}, expected "
                f"trajectories numbered from 0, each in one group; it was in group "
                f"{group_of.get(owner)} before"
            )
