"""Layers of a chunk, their norm, and queries, keys and values of tensor ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from mega_agentrl.actor.model.layer_spec import RMSNorm, decoder_block_spec
from mega_agentrl.actor.model.packed_attention import PackedAttention
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from tests.actor.circles import mark_extended
from tests.actor.model.model_jobs import query_key_value
from tests.tiny_models import make_tiny_model

WHOLE = ModelParallelRank()


@pytest.fixture
def shape(tmp_path):
    """Return `shape("llama", mlp_bias=True)`, which makes the shape of a tiny model."""

    def make(name, **changes):
        return ModelShape.from_folder(make_tiny_model(name, tmp_path / "model", **changes))

    return make


def test_virtual_chunks_have_their_own_dense_and_moe_layers(shape):
    moe = shape("qwen3_moe", num_hidden_layers=8, mlp_only_layers=[1, 4])
    sparse = {
        (rank, chunk): [
            layer.submodules.mlp.func is MoELayer
            for layer in decoder_block_spec(
                moe, ModelParallelRank(pipeline_rank=rank, pipeline_size=2, virtual_size=2), chunk
            ).layer_specs
        ]
        for rank in range(2)
        for chunk in range(2)
    }
    # Runs of two layers, assigned to (rank, chunk) in the order (0, 0), (1, 0), (0, 1), (1, 1).
    assert sparse == {
        (0, 0): [True, False],
        (1, 0): [True, True],
        (0, 1): [False, True],
        (1, 1): [True, True],
    }


def test_the_first_and_the_last_stage_have_a_layer_fewer_where_stages_do_not_divide(shape):
    moe = shape("qwen3_moe", num_hidden_layers=6)
    ranks = [ModelParallelRank(pipeline_rank=n, pipeline_size=2, virtual_size=2) for n in (0, 1)]
    sizes = [[len(decoder_block_spec(moe, rank, n).layer_specs) for n in (0, 1)] for rank in ranks]
    assert sizes == [[1, 2], [2, 1]]


def test_local_layers_use_the_norm_and_attention_of_this_package(shape):
    spec = decoder_block_spec(shape("qwen3"), WHOLE, 0)
    assert spec.layer_norm is RMSNorm
    for layer in spec.layer_specs:
        assert layer.submodules.input_layernorm is layer.submodules.pre_mlp_layernorm is RMSNorm
        attention = layer.submodules.self_attention.submodules
        assert attention.core_attention is PackedAttention
        assert attention.q_layernorm is RMSNorm


def norm(weight, eps=1e-6):
    made = RMSNorm(SimpleNamespace(params_dtype=weight.dtype), len(weight), eps=eps)
    made.weight.data = weight
    return made


def test_a_row_is_divided_by_its_root_mean_square():
    # mean of squares of (3, 4) and eps 0.5: 12.5 + 0.5 = 13
    out = norm(torch.tensor([1.0, 2.0]), eps=0.5)(torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(out, torch.tensor([[3.0, 8.0]]) / 13**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_transformers(dtype):
    generator = torch.Generator().manual_seed(5)
    weight = (1 + 0.3 * torch.randn(64, generator=generator)).to(dtype)
    reference = Qwen3RMSNorm(64, eps=1e-6).to(dtype)
    reference.weight.data = weight.clone()
    norm_module = norm(weight.clone())
    value = 3 * torch.randn(7, 5, 64, generator=torch.Generator().manual_seed(6))
    inputs = [value.to(dtype, copy=True).requires_grad_() for _ in range(2)]
    outs = [module(value) for module, value in zip((norm_module, reference), inputs, strict=True)]
    # The same roundings in the same order: equal in bfloat16, not only close.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.0}[dtype]
    torch.testing.assert_close(outs[0], outs[1], rtol=tolerance, atol=tolerance)
    for out in outs:
        out.float().square().sum().backward()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    gradients = [norm_module.weight.grad, reference.weight.grad]
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("num_ranks", "num_groups"),
    mark_extended([(2, 1), (4, 1), (4, 2), (2, 2)], quick=[(2, 1), (2, 2)]),
)
def test_a_rank_has_its_queries_and_the_key_and_value_of_their_group(
    rank_pool, tmp_path, num_ranks, num_groups
):
    folder = make_tiny_model("qwen3", tmp_path / "model", num_key_value_heads=num_groups)
    ((query, key, value),) = rank_pool.run(query_key_value, 1, str(folder), ParallelConfig())
    assert query.shape == (10, 1, 4, 16)
    layout = ParallelConfig(tensor=num_ranks)
    for rank, parts in enumerate(rank_pool.run(query_key_value, num_ranks, str(folder), layout)):
        heads = range(rank * 4 // num_ranks, (rank + 1) * 4 // num_ranks)
        groups = sorted({head * num_groups // 4 for head in heads})
        for part, whole, picked in zip(
            parts, (query, key, value), (list(heads), groups, groups), strict=True
        ):
            torch.testing.assert_close(part, whole[:, :, picked], rtol=1e-5, atol=1e-5)
