from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.parallel.grad_sync_flags import set_grad_sync_flags
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.tiny_models import make_tiny_model

LAYER = "decoder.layers.0."
# name: sharded over tensor ranks, dense, summed under sequence parallelism
EXPECTED = {
    "embedding.word_embeddings.weight": (True, True, False),
    f"{LAYER}input_layernorm.weight": (False, True, True),
    f"{LAYER}self_attention.linear_qkv.weight": (True, True, False),
    f"{LAYER}self_attention.linear_qkv.bias": (True, True, False),
    f"{LAYER}self_attention.linear_proj.bias": (False, True, True),
    f"{LAYER}self_attention.q_layernorm.weight": (False, True, False),
    f"{LAYER}self_attention.linear_qkv.layer_norm_weight": (False, True, True),
    f"{LAYER}mlp.router.weight": (False, True, True),
    f"{LAYER}mlp.experts.local_experts.1.linear_fc2.weight": (True, False, False),
    f"{LAYER}mlp.experts.linear_fc1.weight3": (True, False, False),
    "decoder.final_layernorm.weight": (False, True, True),
}


class Named(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        self.named = {name: torch.nn.Parameter(torch.zeros(1)) for name in names}

    def named_parameters(self):
        return self.named.items()


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return {
        name: ModelShape.from_folder(make_tiny_model(name, tmp_path_factory.mktemp(name)))
        for name in ("qwen3_moe", "qwen3_reward")
    }


@pytest.mark.parametrize("sequence", [True, False])
def test_flags_by_kind_of_parameter(shapes, sequence):
    model = Named([*EXPECTED, "output_layer.weight"])
    set_grad_sync_flags(model, shapes["qwen3_moe"], sequence=sequence)
    for name, (sharded, dense, summed) in EXPECTED.items():
        parameter = model.named[name]
        marks = (parameter.tensor_model_parallel, parameter.allreduce, parameter.sequence_parallel)
        assert marks == (sharded, dense, summed and sequence), name
    assert model.named["output_layer.weight"].tensor_model_parallel


def test_a_scalar_head_is_whole_and_never_summed(shapes):
    model = Named(["output_layer.weight"])
    set_grad_sync_flags(model, shapes["qwen3_reward"], sequence=True)
    head = model.named["output_layer.weight"]
    assert (head.tensor_model_parallel, head.sequence_parallel) == (False, False)
