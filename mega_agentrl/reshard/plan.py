"""Which bytes travel from which trainer rank, in which message. Pure and deterministic.

Every trainer rank describes its shards as blocks of Hugging Face tensors. A block that several
ranks hold (data-parallel replicas, norms under tensor parallelism, the two copies of a tied
embedding) is sent by one of them, the one with the least to send so far. Then blocks are cut to
bucket size and packed, per source, into messages; message numbers give one order for everybody:

    source rank   sends its messages in that order, each to every sink
    sink          receives all messages in that order

so no two ranks ever wait for each other in a circle. Sinks get everything for now; narrowing a
message to what a sink needs changes only this file and the header of a message.

`Message.pieces` carry the rectangles of both sides; `transport` moves them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout, check_cover

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of the types weights may travel in."""


@dataclass(frozen=True, slots=True)
class HFTensor:
    """One tensor as the checkpoint names it; `dtype` is the type it travels in."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of parameter `param` of the source rank."""

    param: str
    block: Block
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """What one source rank sends in one go. index: place in the common order."""

    index: int
    source: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights in it."""
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Everything both sides must agree on. Ranks: trainer ranks first, then sinks."""

    num_sources: int
    num_sinks: int
    tensors: tuple[HFTensor, ...]
    messages: tuple[Message, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the transport group."""
        return self.num_sources + self.num_sinks

    @property
    def sinks(self) -> range:
        """Ranks that receive."""
        return range(self.num_sources, self.world_size)

    def sent_bytes(self) -> dict[int, int]:
        """Bytes of weights that each source rank sends to one sink."""
        sent = dict.fromkeys(range(self.num_sources), 0)
        for message in self.messages:
            sent[message.source] += message.num_bytes
        return sent

    def summary(self) -> str:
        """One line for logs."""
        sent = self.sent_bytes()
        spread = ", ".join(f"rank {rank} {count / 2**20:.2f}" for rank, count in sent.items())
        return (
            f"{len(self.tensors)} tensors in {len(self.messages)} messages to {self.num_sinks} "
            f"sinks; MiB per sink: {spread}"
        )


def make_plan(
    sources: Sequence[Sequence[ShardLayout]],
    hf_shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str] | str,
    num_sinks: int,
    *,
    bucket_bytes: int = 64 * 2**20,
) -> TransferPlan:
    """Plan a full update.

    sources: shards of every trainer rank. dtypes: by Hugging Face name, or one for all.
    bucket_bytes: target size of a message. Raises `ValueError` where the shards do not hold
    every element exactly once (replicas aside), or a type is unknown.
    """
    if num_sinks < 1 or bucket_bytes < 1:
        raise ValueError(
            f"make_plan: num_sinks={num_sinks}, bucket_bytes={bucket_bytes}; expected both >= 1"
        )
    tensors = tuple(
        HFTensor(name, tuple(shape), _dtype_of(name, dtypes)) for name, shape in hf_shapes.items()
    )
    chosen = _choose_sources(sources, tensors)
    _check(chosen, hf_shapes)
    return TransferPlan(
        num_sources=len(sources),
        num_sinks=num_sinks,
        tensors=tensors,
        messages=_pack(chosen, bucket_bytes),
    )


def _dtype_of(name: str, dtypes: Mapping[str, str] | str) -> str:
    dtype = dtypes if isinstance(dtypes, str) else dtypes.get(name, "none")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name}: dtype={dtype}, expected one of {', '.join(ITEM_BYTES)}")
    return dtype


Chosen = list[tuple[int, Piece]]


def _choose_sources(
    sources: Sequence[Sequence[ShardLayout]], tensors: Sequence[HFTensor]
) -> Chosen:
    """One (source rank, piece) per block, in the order of the tensors."""
    holders: dict[str, dict[Rect, dict[int, tuple[str, Block]]]] = defaultdict(dict)
    for rank, shards in enumerate(sources):
        for shard in shards:
            for block in shard.blocks:
                held = holders[block.hf_name].setdefault(block.hf_rect, {})
                held.setdefault(rank, (shard.name, block))
    unknown = sorted(set(holders) - {tensor.name for tensor in tensors})
    if unknown:
        raise ValueError(
            f"make_plan: trainer shards name tensors the model does not have: {unknown}; "
            "probable cause: layouts and shapes come from different models"
        )
    load = [0] * len(sources)
    chosen: Chosen = []
    for tensor in tensors:
        for rect in sorted(holders[tensor.name]):
            held = holders[tensor.name][rect]
            rank = min(held, key=lambda candidate: (load[candidate], candidate))
            param, block = held[rank]
            num_bytes = rect.numel * ITEM_BYTES[tensor.dtype]
            load[rank] += num_bytes
            chosen.append((rank, Piece(param, block, num_bytes)))
    return chosen


def _check(chosen: Chosen, hf_shapes: Mapping[str, tuple[int, ...]]) -> None:
    shards = [
        ShardLayout(f"rank {rank} {piece.param}", piece.block.local_rect.stop, (piece.block,))
        for rank, piece in chosen
    ]
    check_cover(hf_shapes, shards, owner="weight transfer plan")


def _pack(chosen: Chosen, bucket_bytes: int) -> tuple[Message, ...]:
    """Fill one open message per source; its number is that of its first piece."""
    messages: list[list[Piece]] = []
    source_of: list[int] = []
    filling: dict[int, tuple[int, int]] = {}
    for rank, whole in chosen:
        for piece in _cut(whole, bucket_bytes):
            index, size = filling.get(rank, (-1, bucket_bytes))
            if index < 0 or size + piece.num_bytes > bucket_bytes:
                index, size = len(messages), 0
                messages.append([])
                source_of.append(rank)
            messages[index].append(piece)
            filling[rank] = (index, size + piece.num_bytes)
    return tuple(
        Message(index, source_of[index], tuple(pieces)) for index, pieces in enumerate(messages)
    )


def _cut(piece: Piece, bucket_bytes: int) -> list[Piece]:
    """Slices along dim 0 of at most `bucket_bytes`, at least one row each."""
    num_rows = piece.block.hf_rect.shape[0]
    row_bytes = piece.num_bytes // num_rows
    rows = max(1, bucket_bytes // row_bytes)
    if rows >= num_rows:
        return [piece]
    return [
        replace(
            piece,
            block=Block(
                piece.block.hf_name,
                _row_slice(piece.block.hf_rect, start, min(start + rows, num_rows)),
                _row_slice(piece.block.local_rect, start, min(start + rows, num_rows)),
            ),
            num_bytes=row_bytes * (min(start + rows, num_rows) - start),
        )
        for start in range(0, num_rows, rows)
    ]


def _row_slice(rect: Rect, start: int, stop: int) -> Rect:
    origin = rect.start[0]
    return Rect((origin + start, *rect.start[1:]), (origin + stop, *rect.stop[1:]))
