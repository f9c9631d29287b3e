"""The part of the model that one rank holds: its parallel position, and its shards of tensors.

Dense weights are distributed over tensor and pipeline ranks, experts over the expert and
expert-tensor ranks of the same processes. With `virtual_size` V a pipeline rank holds V chunks of
layers: chunk v of rank p is the (v * pipeline_size + p)-th run of layers of the model. Data and
context ranks hold replicas and do not appear.

Hugging Face tensors become a parameter of one rank in one of three ways:

    replicate      the tensor itself, the same on every rank
    slice_columns  an equal share of a matrix's columns
    stack_rows     rows of several tensors stacked, of which the rank holds a window; rows beyond
                   the last tensor are padding

A bias is sharded like the rows of its matrix, with an empty `row_shape`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mega_agentrl.config.checks.parallel import split_layers
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParallelRank:
    """Ranks and sizes of one process along each model-parallel axis.

    Raises `ValueError` for a rank outside its size.
    """

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    virtual_size: int = 1
    """Number of layer chunks per pipeline rank."""
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("tensor", "pipeline", "expert", "expert_tensor"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise InputError(f"{axis}_rank", rank, f"0..{size - 1}")
        if self.virtual_size < 1:
            raise InputError("virtual_size", self.virtual_size, "at least 1")

    def param_prefix(self, chunk: int) -> str:
        """Return the prefix of a chunk's parameter names, empty if there is only one chunk."""
        return f"chunk{chunk}." if self.virtual_size > 1 else ""

    def layers(self, chunk: int, num_layers: int) -> range:
        """Return the layers of a chunk, of the `num_layers` of the model (`split_layers`)."""
        stages = split_layers(num_layers, self.pipeline_size * self.virtual_size)
        return stages[chunk * self.pipeline_size + self.pipeline_rank]

    def holds_embedding(self, chunk: int) -> bool:
        """Return whether this is the first chunk of the model."""
        return self.pipeline_rank == 0 and chunk == 0

    def holds_output_layer(self, chunk: int) -> bool:
        """Return whether this is the last chunk of the model."""
        return self.pipeline_rank == self.pipeline_size - 1 and chunk == self.virtual_size - 1


@dataclass(frozen=True, slots=True)
class RowRange:
    """`num_rows` rows of a Hugging Face tensor, from row `start`."""

    hf_name: str
    start: int
    num_rows: int


def replicate(name: str, hf_name: str, shape: tuple[int, ...]) -> ShardLayout:
    """Return a parameter that equals a Hugging Face tensor."""
    rect = Rect.whole(shape)
    return ShardLayout(name, shape, (Block(hf_name, rect, rect),))


def slice_columns(
    name: str, hf_name: str, full_shape: tuple[int, int], *, rank: int, size: int
) -> ShardLayout:
    """Return the columns that rank `rank` of `size` holds of a matrix of shape `full_shape`."""
    rows, width = full_shape[0], full_shape[1] // size
    hf_rect = Rect((0, rank * width), (rows, (rank + 1) * width))
    return ShardLayout(name, (rows, width), (Block(hf_name, hf_rect, Rect.whole((rows, width))),))


def stack_rows(
    name: str,
    parts: Iterable[RowRange],
    row_shape: tuple[int, ...],
    *,
    window: tuple[int, int] | None = None,
) -> ShardLayout:
    """Return the rows window[0] .. window[1]-1 of all parts stacked in order.

    Args:
        name: Parameter name.
        parts: Rows to stack.
        row_shape: Shape of one row: `(hidden,)` for a matrix, `()` for a bias.
        window: First row and end of the rank's rows, or None for all.
    """
    parts = list(parts)
    first, last = window or (0, sum(part.num_rows for part in parts))
    blocks, offset, zeros = [], 0, (0,) * len(row_shape)
    for part in parts:
        low, high = max(offset, first), min(offset + part.num_rows, last)
        if low < high:
            shift = part.start - offset
            hf_rect = Rect((low + shift, *zeros), (high + shift, *row_shape))
            local_rect = Rect((low - first, *zeros), (high - first, *row_shape))
            blocks.append(Block(part.hf_name, hf_rect, local_rect))
        offset += part.num_rows
    return ShardLayout(name, (last - first, *row_shape), tuple(blocks))
