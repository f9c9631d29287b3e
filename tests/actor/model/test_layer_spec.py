from __future__ import annotations

import pytest
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer

from mega_agentrl.actor.model.gathered_kv_attention import GatheredKVAttention
from mega_agentrl.actor.model.layer_spec import decoder_block_spec, linear_with_bias
from mega_agentrl.actor.model.packed_attention import PackedAttention
from mega_agentrl.actor.model.rms_norm import RMSNorm
from mega_agentrl.reshard.mapping.model_parallel_rank import ModelParallelRank
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.tiny_models import make_tiny_model

WHOLE = ModelParallelRank()


@pytest.fixture
def shape(tmp_path):
    """`shape("llama", mlp_bias=True)`"""

    def make(name, **changes):
        return ModelShape.from_folder(make_tiny_model(name, tmp_path / "model", **changes))

    return make


def test_virtual_chunks_take_their_own_dense_and_sparse_layers(shape):
    moe = shape("qwen3_moe", num_hidden_layers=8, mlp_only_layers=[1, 4])
    sparse = {
        (rank, chunk): [
            layer.submodules.mlp.module is MoELayer
            for layer in decoder_block_spec(
                moe, ModelParallelRank(pipeline_rank=rank, pipeline_size=2, virtual_size=2), chunk
            ).layer_specs
        ]
        for rank in range(2)
        for chunk in range(2)
    }
    # Runs of two layers, dealt to (rank, chunk) in the order (0, 0), (1, 0), (0, 1), (1, 1).
    assert sparse == {
        (0, 0): [True, False],
        (1, 0): [True, True],
        (0, 1): [False, True],
        (1, 1): [True, True],
    }


def test_local_layers_use_the_norm_and_attention_of_this_package(shape):
    spec = decoder_block_spec(shape("qwen3"), WHOLE, 0)
    assert spec.layer_norm is RMSNorm
    for layer in spec.layer_specs:
        assert layer.submodules.input_layernorm is layer.submodules.pre_mlp_layernorm is RMSNorm
        attention = layer.submodules.self_attention
        assert attention.module is GatheredKVAttention
        assert attention.submodules.core_attention is PackedAttention
        assert attention.submodules.q_layernorm is RMSNorm


def test_queries_and_keys_are_normalised_only_where_the_family_does(shape):
    attention = (
        decoder_block_spec(shape("qwen2"), WHOLE, 0).layer_specs[0].submodules.self_attention
    )
    assert attention.submodules.q_layernorm is attention.submodules.k_layernorm is IdentityOp


@pytest.mark.parametrize("attention_bias", [True, False])
@pytest.mark.parametrize("mlp_bias", [True, False])
def test_biases_stand_on_the_linears_that_have_one(shape, attention_bias, mlp_bias):
    llama = shape("llama", attention_bias=attention_bias, mlp_bias=mlp_bias)
    layer = decoder_block_spec(llama, WHOLE, 0).layer_specs[0].submodules
    mlp = layer.mlp.submodules
    changed = {
        layer.self_attention.submodules.linear_proj: (RowParallelLinear, attention_bias),
        mlp.linear_fc1: (ColumnParallelLinear, mlp_bias),
        mlp.linear_fc2: (RowParallelLinear, mlp_bias),
    }
    for got, (plain, bias) in changed.items():
        assert issubclass(got, plain)
        assert (got is not plain) == bias


def test_linear_with_bias_overrides_the_configuration():
    class Linear:
        def __init__(self, size, *, bias):
            self.size, self.bias = size, bias

    made = linear_with_bias(Linear)(3, bias=False)
    assert (made.size, made.bias) == (3, True)
    assert type(made).__name__ == "BiasedLinear"
