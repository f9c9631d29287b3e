"""Low-rank adapters: their tensors, and which parts of them each rank holds.

An adapter replaces a weight W `[out, in]` by W + alpha / rank * B A with A `[rank, in]` and
B `[out, rank]` (arXiv 2106.09685). Names follow PEFT: the adapter of `NAME.weight` has the tensors
`NAME.lora_A.weight` and `NAME.lora_B.weight`. A rank holds the columns of A and the rows of B that
belong to its part of W, so that it computes the change of its part alone. Where it holds whole
columns of W, other tensor ranks hold the same A (`linear_qkv`, `linear_fc1`), and where it holds
whole rows, the same B (`linear_proj`, `linear_fc2`). A vision tower, which has linear layers of the
same names, gets none.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import Block, Rect, ShardLayout

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

_ADAPTED = re.compile(r"(?!(?:model\.)?visual\.)(?P<module>.+\.(?P<target>\w+_proj))\.weight")
_ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_MEGATRON_ADAPTER = re.compile(
    r".*\.linear_(?P<kind>qkv|proj|fc1|fc2)\.lora\.\w+\.(?P<factor>[AB])"
)


def adapted_module(hf_name: str, targets: Collection[str]) -> str | None:
    """Return the name of the module whose weight this is, or None if it gets no adapter."""
    match = _ADAPTED.fullmatch(hf_name)
    return match["module"] if match and match["target"] in targets else None


def adapter_of(hf_name: str) -> tuple[str, str]:
    """Return the module and the factor, "A" or "B", of a tensor of an adapter."""
    match = _ADAPTER.fullmatch(hf_name)
    assert match is not None, f"{hf_name} is not of an adapter"
    return match["module"], match["factor"]


def lora_shapes(
    hf_shapes: Mapping[str, tuple[int, ...]], rank: int, targets: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every tensor of the adapters, in model order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for hf_name, full_shape in hf_shapes.items():
        if (module := adapted_module(hf_name, targets)) is not None:
            num_rows, num_columns = full_shape
            shapes[f"{module}.lora_A.weight"] = (rank, num_columns)
            shapes[f"{module}.lora_B.weight"] = (num_rows, rank)
    return shapes


def lora_shards(
    shards: Iterable[ShardLayout], rank: int, targets: Collection[str]
) -> list[ShardLayout]:
    """Return the parameters of the adapters of a rank's weights, in the order of the weights.

    They are named after the weight and the target. In a weight that joins several modules of one
    target, as vLLM's experts do, the name has the module in place of the target.
    """
    adapters = []
    for shard in shards:
        rects: dict[str, list[Rect]] = {}
        for block in shard.blocks:
            if (module := adapted_module(block.hf_name, targets)) is not None:
                rects.setdefault(module, []).append(block.hf_rect)
        num_modules = Counter(module.rpartition(".")[2] for module in rects)
        for module, parts in rects.items():
            target = module.rpartition(".")[2]
            own_name = target if num_modules[target] == 1 else module
            prefix = f"{shard.name.removesuffix('weight')}lora.{own_name}"
            rows, columns = (
                (min(rect.start[dim] for rect in parts), max(rect.stop[dim] for rect in parts))
                for dim in (0, 1)
            )
            a_rect = Rect((0, columns[0]), (rank, columns[1]))
            b_rect = Rect((rows[0], 0), (rows[1], rank))
            adapters += [
                _whole_block(f"{prefix}.A", f"{module}.lora_A.weight", a_rect),
                _whole_block(f"{prefix}.B", f"{module}.lora_B.weight", b_rect),
            ]
    return adapters


def is_lora_param(name: str) -> bool:
    """Return whether a Megatron parameter belongs to an adapter."""
    return _MEGATRON_ADAPTER.fullmatch(name) is not None


def is_lora_replicated(name: str) -> bool:
    """Return whether all tensor ranks hold the same values of a parameter of an adapter."""
    match = _MEGATRON_ADAPTER.fullmatch(name)
    assert match is not None, f"{name} is not of an adapter"
    return (match["factor"] == "A") == (match["kind"] in ("qkv", "fc1"))


def _whole_block(name: str, hf_name: str, rect: Rect) -> ShardLayout:
    return ShardLayout(name, rect.shape, (Block(hf_name, rect, Rect.whole(rect.shape)),))
