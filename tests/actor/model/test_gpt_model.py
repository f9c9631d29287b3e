"""Models of every family against transformers: hidden states, gradients, norm counts."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
import transformers
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from mega_agentrl.actor import device
from mega_agentrl.actor.model import gpt_model
from mega_agentrl.actor.model.gpt_model import (
    build_model_chunks,
    build_transformer_config,
    check_parameter_shapes,
    set_grad_sync_flags,
    wrap_with_ddp,
)
from mega_agentrl.config.checks.library_options import MEGATRON
from mega_agentrl.config.enums import Recompute
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.hf_checkpoint import read_shards
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.mapping.model_shape import HeadKind, ModelShape
from tests.actor.circles import mark_extended
from tests.actor.model.model_jobs import differentiate
from tests.parallel.reference import checkpoint_tensors
from tests.rank_shards import pack_rows
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")

MODELS = {
    "llama": ("llama", {}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, mlp biases": ("llama", {"mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3, one key head": ("qwen3", {"num_key_value_heads": 1}),
    "moe": ("qwen3_moe", {}),
    "moe, weights not rescaled": ("qwen3_moe", {"norm_topk_prob": False}),
    "moe, dense layer": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "reward": ("qwen3_reward", {}),
    "llama, six layers": ("llama", {"num_hidden_layers": 6}),
    "moe, six layers": ("qwen3_moe", {"num_hidden_layers": 6}),
}
TWO = {
    "qwen3": {"tensor": 2, "sequence_parallel": True},
    "qwen3, one key head": {"tensor": 2, "sequence_parallel": True},
    "qwen3, biases": {"context": 2},
    "llama, all biases": {"tensor": 2, "sequence_parallel": True},
    "llama, mlp biases": {"tensor": 2, "recompute": Recompute.selective},
    "llama": {"tensor": 2},
    "qwen2, tied": {"pipeline": 2, "virtual_pipeline": 2},
    "moe": {"tensor": 2, "sequence_parallel": True, "expert": 2},
    "moe, weights not rescaled": {"data": 2, "expert": 2},
    "moe, dense layer": {"tensor": 2, "sequence_parallel": True, "expert_tensor": 1},
    "reward": {"tensor": 2, "sequence_parallel": True},
}
FOUR = {
    "qwen2, tied": {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
    "llama, six layers": {"pipeline": 4},  # stages of 1, 2, 2 and 1
    "moe, six layers": {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "expert": 2},
    "moe": {"tensor": 2, "data": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 2},
    "moe, dense layer": {"tensor": 2, "pipeline": 2, "sequence_parallel": True, "expert_tensor": 2},
    "reward": {"tensor": 2, "data": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            architecture, changes = MODELS[name]
            folder = tmp_path_factory.mktemp("model")
            made[name] = make_tiny_model(architecture, folder, **changes)
        return made[name]

    return get


def reference(folder):
    shape = ModelShape.from_folder(folder)
    kind = "AutoModelForCausalLM"
    if shape.head is HeadKind.scalar:
        kind = "AutoModelForSequenceClassification"
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)


def outputs(network, token_L):
    """Return `[L, V]` logits, or `[L, 1]` scores of every position."""
    if hasattr(network, "score"):
        return network.score(network.model(token_L[None]).last_hidden_state)[0]
    return network(token_L[None]).logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_give_the_outputs_of_transformers(name, folders, one_rank, batch):
    folder = folders(name)
    shape = ModelShape.from_folder(folder)
    (model,) = build_model_chunks(shape, one_rank, ParallelConfig(), torch.float32)
    layout = megatron_layout(shape, one_rank.coordinates.model_parallel_rank)
    check_parameter_shapes([model], layout)
    read_shards(folder, layout, hf_shapes(shape), dict(model.named_parameters()))
    micro = pack_rows(batch, [0, 2, 5], batch.mask_BT, CPU)
    rows = 1 if shape.head is HeadKind.scalar else shape.vocab_size
    got = model.forward_packed(micro).squeeze(1) @ model.output_weight()[:rows].t()
    network = reference(folder)
    for start, stop in pairwise(micro.start_G):
        expected = outputs(network, micro.token_S[start:stop])
        torch.testing.assert_close(got[start:stop], expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_runs_on_a_cpu_too(folders, one_rank, batch):
    shape = ModelShape.from_folder(folders("moe"))
    hidden = []
    for dtype in (torch.float32, torch.bfloat16):
        chunks = build_model_chunks(shape, one_rank, ParallelConfig(), dtype)
        layout = megatron_layout(shape, one_rank.coordinates.model_parallel_rank)
        parameters = dict(chunks[0].named_parameters())
        assert {parameter.dtype for parameter in parameters.values()} == {dtype}
        read_shards(folders("moe"), layout, hf_shapes(shape), parameters)
        (wrapped,) = wrap_with_ddp(chunks, one_rank, ParallelConfig())
        hidden.append(chunks[0].forward_packed(pack_rows(batch, [0, 1], batch.mask_BT, CPU)))
        hidden[-1].float().square().mean().backward()
        gradient = wrapped.module.decoder.final_layernorm.weight.main_grad
        assert gradient.dtype == torch.float32
        assert gradient.abs().sum() > 0
    assert hidden[1].dtype == torch.bfloat16
    # Another rounding may send a token to another expert: most tokens agree, not all.
    close_S = (hidden[0] - hidden[1].float()).abs().amax(dim=(1, 2)) < 0.3
    assert close_S.float().mean() > 0.7


def test_a_scalar_head_replaces_that_of_a_language_model(folders, one_rank):
    shape = ModelShape.from_folder(folders("qwen2, tied"))
    shape = dataclasses.replace(shape, head=HeadKind.scalar)
    (model,) = build_model_chunks(shape, one_rank, ParallelConfig(), torch.float32)
    check_parameter_shapes(
        [model], megatron_layout(shape, one_rank.coordinates.model_parallel_rank)
    )
    assert model.output_weight().shape == (1, shape.hidden_size)
    assert not model.output_weight().tensor_model_parallel


def test_a_mapping_without_a_parameter_is_refused(folders, one_rank):
    shape = ModelShape.from_folder(folders("qwen3"))
    chunks = build_model_chunks(shape, one_rank, ParallelConfig(), torch.float32)
    layout = megatron_layout(shape, one_rank.coordinates.model_parallel_rank)
    lacking = [shard for shard in layout if shard.name != "decoder.final_layernorm.weight"]
    with pytest.raises(AssertionError):
        check_parameter_shapes(chunks, lacking)


def test_one_rescaled_expert_per_token_is_refused(folders, one_rank):
    shape = ModelShape.from_folder(folders("moe"))
    shape = dataclasses.replace(shape, moe=dataclasses.replace(shape.moe, top_k=1))
    with pytest.raises(InputError) as caught:
        build_transformer_config(shape, one_rank, ParallelConfig(), torch.float32)
    assert (caught.value.name, caught.value.got) == ("num_experts_per_tok", 1)


def test_a_users_fields_reach_megatrons_configuration(folders, one_rank):
    shape = ModelShape.from_folder(folders("qwen3"))
    arguments = shape, one_rank, ParallelConfig(), torch.float32
    options = {"attention_backend": "unfused", "attention_softmax_in_fp32": False}
    config = build_transformer_config(*arguments, options=options)
    assert config.attention_backend is AttnBackend.unfused
    assert config.attention_softmax_in_fp32 is False
    assert config.moe_token_dispatcher_type == "alltoall"
    with pytest.raises(TypeError):
        build_transformer_config(*arguments, options={"num_layers": 4})


@pytest.mark.parametrize("name", ["qwen3", "moe"])
@pytest.mark.parametrize("recompute", Recompute)
def test_a_field_that_is_set_here_is_none_of_the_users(
    name, recompute, folders, one_rank, monkeypatch
):
    given = {}

    class Recorder(TransformerConfig):
        def __init__(self, **values):
            given.update(values)
            super().__init__(**values)

    monkeypatch.setattr(gpt_model, "TransformerConfig", Recorder)
    shape, layout = ModelShape.from_folder(folders(name)), ParallelConfig(recompute=recompute)
    build_transformer_config(shape, one_rank, layout, torch.float32)
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert given.keys() - {"moe_token_dispatcher_type"} <= MEGATRON.owners.keys() <= known


@pytest.fixture(scope="module")
def ranks(rank_pool, folders, batch):
    """Return `ranks(number, name)`: the results of `differentiate` by rank."""
    done = {}

    def get(number, name):
        if (number, name) not in done:
            layout = {2: TWO, 4: FOUR}[number][name]
            layout = ParallelConfig(**layout, distributed_optimizer=False)
            arguments = str(folders(name)), layout, batch
            done[number, name] = rank_pool.run(differentiate, number, *arguments)
        return done[number, name]

    return get


@pytest.fixture(scope="module")
def expected(folders, batch):
    """Return `expected(name)`: `[B, T]` outputs and the gradients of their weighted sum."""
    done = {}

    def get(name):
        if name not in done:
            network = reference(folders(name))
            width, rows = batch.response_BT.size(1), []
            for row, prompt in enumerate(batch.prompt_ids):
                length = int(batch.length_B[row])
                response_L = batch.response_BT[row, :length]
                token_L = torch.cat([torch.tensor(prompt), response_L])[:-1]
                out = outputs(network, token_L)[len(prompt) - 1 :]
                if out.size(1) > 1:
                    out = out.log_softmax(1).gather(1, response_L[:, None])
                rows.append(torch.nn.functional.pad(out[:, 0], (0, width - length)))
            value_BT = torch.stack(rows)
            (value_BT * batch.advantage_BT * batch.mask_BT).sum().backward()
            gradients = checkpoint_tensors(network, gradients=True)
            done[name] = value_BT.detach() * batch.mask_BT, gradients
        return done[name]

    return get


CASES = mark_extended(
    [(2, name) for name in TWO] + [(4, name) for name in FOUR],
    quick=[
        (2, "llama, all biases"),
        (2, "qwen3, biases"),
        (2, "qwen2, tied"),
        (2, "moe"),
        (2, "reward"),
    ],
)


@pytest.mark.parametrize(("number", "name"), CASES)
def test_values_and_gradients_are_those_of_one_process(number, name, ranks, expected):
    value_BT, gradients = expected(name)
    found_BT, seen = torch.zeros_like(value_BT), set()
    for result in ranks(number, name):
        for rows, value_RT in result.values:
            for row, value_T in zip(rows, value_RT, strict=True):
                # Context ranks give a part of the tokens each, tensor ranks all of them.
                found_BT[row] = torch.where(value_T != 0, value_T, found_BT[row])
        for hf_name, rect, gradient in result.gradients:
            whole = gradients[hf_name]
            error = (gradient - whole[rect.slices]).norm() / whole.norm()
            assert error < 1e-4, f"{hf_name} {rect}: relative error {error}"
            seen.add(hf_name)
    torch.testing.assert_close(found_BT, value_BT, rtol=1e-4, atol=1e-4)
    assert seen == set(gradients)


@pytest.mark.parametrize(("number", "name"), CASES)
def test_a_norm_over_the_ranks_counts_every_element_once(number, name, ranks, folders):
    shape = ModelShape.from_folder(folders(name))
    whole = sum(torch.Size(size).numel() for size in hf_shapes(shape).values())
    # 61 rows of the vocabulary are 64 in all layouts: one shard of 64, two of 32.
    num_tables = 1 if shape.tie_word_embeddings or shape.head is HeadKind.scalar else 2
    padding = num_tables * 3 * shape.hidden_size
    assert sum(result.counted for result in ranks(number, name)) == whole + padding


def test_parameters_are_on_the_device_of_the_rank(folders, one_rank):
    shape = ModelShape.from_folder(folders("qwen3"))
    (model,) = build_model_chunks(shape, one_rank, ParallelConfig(), torch.float32)
    assert {parameter.device for parameter in model.parameters()} == {device.current_device()}


LAYER = "decoder.layers.0."
# name: sharded over tensor ranks, dense, summed under sequence parallelism
FLAGS = {
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


@pytest.mark.parametrize("sequence", [True, False])
def test_grad_sync_flags_by_kind_of_parameter(folders, sequence):
    model = Named([*FLAGS, "output_layer.weight"])
    set_grad_sync_flags(model, ModelShape.from_folder(folders("moe")), sequence=sequence)
    for name, (sharded, dense, summed) in FLAGS.items():
        parameter = model.named[name]
        marks = (parameter.tensor_model_parallel, parameter.allreduce, parameter.sequence_parallel)
        assert marks == (sharded, dense, summed and sequence), name
    assert model.named["output_layer.weight"].tensor_model_parallel


def test_a_scalar_head_is_replicated_and_never_summed(folders):
    model = Named(["output_layer.weight"])
    set_grad_sync_flags(model, ModelShape.from_folder(folders("reward")), sequence=True)
    head = model.named["output_layer.weight"]
    assert (head.tensor_model_parallel, head.sequence_parallel) == (False, False)
