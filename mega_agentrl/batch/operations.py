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

What is checked: `TrainBatch.check`.

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

_OPTIONAL = tuple(spec.name for spec in fields(TrainBatch) if spec.default is None)
_TENSORS = tuple(spec.name for spec in fields(TrainBatch) if spec.name != "prompt_ids")
_MOVABLE = tuple(name for name in _OPTIONAL if name != "owner_B")


def keep(batch: TrainBatch, names: Iterable[str]) -> TrainBatch:
    """The batch with only these of its optional fields; ValueError for one it does not have."""
    wanted = set(names)
    if unknown := sorted(wanted - set(_present(batch))):
        raise ValueError(
            f"keep: {', '.join(unknown)} is not in the batch, expected some of {_present(batch)}"
        )
    return batch.with_fields(**dict.fromkeys(set(_OPTIONAL) - wanted)).check()


def between(batch: TrainBatch, start: int, stop: int) -> TrainBatch:
    """Rows start to stop - 1; ValueError where they are not all there, or there is none."""
    if not 0 <= start < stop <= batch.num_rows:
        raise ValueError(
            f"between: rows {start} to {stop} of a batch of {batch.num_rows}, expected a run of "
            "at least one of its rows"
        )
    return batch.select(range(start, stop))


def concatenate(batches: Sequence[TrainBatch]) -> TrainBatch:
    """One below the other, padded to the widest; the numbers of each go on behind the last one's.

    Raises ValueError for no batch, and for a field that only some have or that changes its dtype;
    `owner_B` is filled in where it is missing.
    """
    if not batches:
        raise ValueError("concatenate: got no batch, expected at least one")
    for batch in batches:
        batch.check()
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
    return batch.with_fields(**added).check()


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
    return batch.with_fields(**{target: getattr(batch, source), source: None}).check()


def repeat(batch: TrainBatch, number: int) -> TrainBatch:
    """Every row `number` times, copies side by side: the same group, trajectories of their own."""
    if number < 1:
        raise ValueError(f"repeat: number={number}, expected at least 1")
    copies = batch.select([row for row in range(batch.num_rows) for _ in range(number)])
    if batch.owner_B is not None and copies.owner_B is not None:
        copy_B = torch.arange(number).repeat(batch.num_rows)
        copies = copies.with_fields(owner_B=copies.owner_B * number + copy_B)
    return copies.check()


def pad_width(batch: TrainBatch, width: int) -> TrainBatch:
    """The batch with T = width; new positions are padding. ValueError for fewer than it has."""
    more = width - batch.response_BT.size(1)
    if more < 0:
        raise ValueError(
            f"pad_width: width={width}, expected at least {batch.response_BT.size(1)}, the width "
            "of response_BT"
        )
    return batch.with_fields(
        **{
            name: functional.pad(
                getattr(batch, name), (0, more), value=PAD_NODE if name == "node_BT" else 0
            )
            for name in _present(batch)
            if name.endswith("_BT")
        }
    ).check()


def pad_rows(batch: TrainBatch, multiple: int) -> TrainBatch:
    """The batch with copies of its last row up to a multiple of rows, none of them trained on.

    Each is a group and a trajectory of its own, without reward; `select(range(B))` takes them off.
    """
    if multiple < 1 or not batch.num_rows:
        raise ValueError(
            f"pad_rows: multiple={multiple} for {batch.num_rows} rows, expected at least one each"
        )
    batch.check()
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
    return whole.select(sorted(range(len(held)), key=held.__getitem__))


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
    return TrainBatch(prompt_ids=sum((one.prompt_ids for one in wide), ()), **tensors).check()


def _present(batch: TrainBatch) -> list[str]:
    return [name for name in _TENSORS if getattr(batch, name) is not None]
