"""Transformer Engine's attention on packed trees, on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from mega_agentrl.actor.model.attention_plan import Branch
from tests.reshard.model_cuts import make_shape
from tests.tree_batches import single_branches, tree_params

FORKED = (
    *single_branches((0, 5, 6)),
    Branch(start=6, stop=20, path=()),
    Branch(start=20, stop=32, path=((6, 12),)),
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None,
        reason="needs a GPU and Transformer Engine",
    ),
]


@pytest.mark.parametrize("branches", [None, FORKED], ids=["rows", "trees"])
def test_packed_trees_attend_as_with_the_kernels_of_torch(one_rank, branches):
    from megatron.core.transformer.enums import AttnMaskType

    from mega_agentrl.actor import device
    from mega_agentrl.actor.model.gpt_model import build_transformer_config
    from mega_agentrl.actor.model.packed_attention import packed_attention
    from mega_agentrl.actor.model.te_attention import PackedTEAttention
    from mega_agentrl.config.sections.policy import ParallelConfig

    shape = make_shape(num_layers=1, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=64)
    config = build_transformer_config(shape, one_rank, ParallelConfig(), torch.bfloat16)
    attention = PackedTEAttention(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        pg_collection=one_rank.pg_collection,
    )
    start_G = (0, 5, 6, 32)
    trees = tree_params(
        start_G, branches or single_branches(start_G), device=device.current_device()
    )
    query, key, value = (
        torch.randn(32, 1, heads, 64, device=device.current_device(), dtype=torch.bfloat16)
        for heads in (4, 2, 2)
    )
    got = attention(query, key, value, None, AttnMaskType.causal, packed_seq_params=trees)
    expected = packed_attention(query, key, value, trees)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
