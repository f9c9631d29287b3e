"""Model shapes without files, all ranks of a cut, and hypothesis strategies for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from mega_agentrl.reshard.layout import ShardLayout
from mega_agentrl.reshard.mapping.model_mapping import megatron_layout
from mega_agentrl.reshard.mapping.model_shape import HeadKind, ModelShape, MoeShape
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from mega_agentrl.reshard.mapping.rope_config import RopeConfig
from mega_agentrl.reshard.planner.regions import RankSetCache, rect_owners

BIASES = {"qkv_bias": True, "o_proj_bias": True, "mlp_bias": True}


def make_shape(**changes: Any) -> ModelShape:
    """Qwen3-like: 8 heads of width 4 over 4 key/value heads, 4 layers, tied, no biases."""
    sizes = {
        "architecture": "Qwen3ForCausalLM",
        "num_layers": 4,
        "hidden_size": 32,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 4,
        "ffn_hidden_size": 24,
        "vocab_size": 50,
        "norm_eps": 1e-6,
        "rope": RopeConfig(theta=1e4),
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "qk_norm": True,
    }
    return ModelShape(**(sizes | changes))


def make_moe_shape(
    *, num_experts: int = 4, ffn_hidden_size: int = 6, moe_layer_pattern: Any = None, **changes: Any
):
    """The same with experts of width 6; `moe_layer_pattern` is per layer, all by default."""
    layers = changes.get("num_layers", 4)
    moe = MoeShape(
        num_experts=num_experts,
        top_k=2,
        ffn_hidden_size=ffn_hidden_size,
        norm_topk_prob=True,
        moe_layer_pattern=tuple(moe_layer_pattern or [True] * layers),
    )
    return make_shape(moe=moe, **changes)


def all_parallel_ranks(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual: int = 1,
    data: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
) -> list[ModelParallelRank]:
    """Places of all ranks: tensor first, then data, then pipeline; experts on the same ranks."""
    return [
        ModelParallelRank(
            tensor_rank=rank % tensor,
            tensor_size=tensor,
            pipeline_rank=stage,
            pipeline_size=pipeline,
            virtual_size=virtual,
            expert_rank=rank // expert_tensor % expert,
            expert_size=expert,
            expert_tensor_rank=rank % expert_tensor,
            expert_tensor_size=expert_tensor,
        )
        for stage in range(pipeline)
        for rank in range(tensor * data)
    ]


def trainer_layouts_of(shape: ModelShape, **sizes: int) -> list[list[ShardLayout]]:
    """Layouts of `all_parallel_ranks` of these sizes."""
    return [megatron_layout(shape, rank) for rank in all_parallel_ranks(**sizes)]


def widened(shape: ModelShape, factor: int) -> ModelShape:
    """The shape with so many times the heads and widths, so that as many ranks can share it."""
    changes: dict[str, Any] = {
        name: getattr(shape, name) * factor
        for name in ("ffn_hidden_size", "num_heads", "num_kv_heads")
    }
    if shape.moe:
        width = shape.moe.ffn_hidden_size * factor
        changes["moe"] = replace(shape.moe, ffn_hidden_size=width)
    return replace(shape, **changes)


@st.composite
def models_and_ranks(draw: st.DrawFn) -> tuple[ModelShape, list[ModelParallelRank]]:
    """A small model of any kind and the ranks of any cut that divides it."""
    tensor, pipeline = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    virtual = draw(st.integers(1, 2)) if pipeline > 1 else 1
    groups = draw(st.integers(1, 2)) * tensor
    if tensor % 2 == 0 and draw(st.booleans()):
        groups = tensor // 2  # fewer key/value heads than tensor ranks
    layers = draw(st.integers(1, 2)) * pipeline * virtual
    changes: dict[str, Any] = {
        "num_kv_heads": groups,
        "num_heads": groups * tensor * draw(st.integers(1, 2)),
        "head_dim": draw(st.sampled_from([2, 4])),
        "ffn_hidden_size": draw(st.integers(1, 3)) * tensor,
        "num_layers": layers,
        "hidden_size": draw(st.integers(1, 6)),
        "vocab_size": draw(st.integers(1, 90)),
        "tie_word_embeddings": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "o_proj_bias": draw(st.booleans()),
    }
    cut = {"tensor": tensor, "pipeline": pipeline, "virtual": virtual, "data": 1}
    if draw(st.booleans()):
        expert, expert_tensor = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        pattern = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
        moe = {
            "num_experts": expert * draw(st.integers(1, 2)),
            "ffn_hidden_size": expert_tensor * draw(st.integers(1, 3)),
            "moe_layer_pattern": pattern,
        }
        cut |= {"expert": expert, "expert_tensor": expert_tensor, "data": expert * expert_tensor}
        return make_moe_shape(**(changes | moe)), all_parallel_ranks(**cut)
    changes["mlp_bias"] = draw(st.booleans())
    if draw(st.booleans()):
        changes |= {"head": HeadKind.scalar, "tie_word_embeddings": False}
    return make_shape(**changes), all_parallel_ranks(**cut)


def ranks_by_row(
    layouts: Sequence[Sequence[ShardLayout]],
) -> dict[tuple[str, int, tuple[int, ...], tuple[int, ...]], Any]:
    """Return the ranks that hold each (tensor, row, first and last columns), however it is cut."""
    return {
        (name, row, rect.start[1:], rect.stop[1:]): ranks
        for name, rects in rect_owners(layouts, RankSetCache()).items()
        for rect, ranks in rects.items()
        for row in range(rect.start[0], rect.stop[0])
    }
