"""What autograd keeps in real passes and the head allocates against the count, by layout."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mega_agentrl.actor.vocab import tiling as vocab_tiles
from mega_agentrl.actor.vocab import torch_kernel as vocab_torch
from mega_agentrl.config.enums import Recompute
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.memory.activations import (
    SCRATCH_BYTES,
    KernelConfig,
    _tile_size,
    head_workspace_bytes,
    layer_activation_bytes,
    layer_backward_workspace_bytes,
    num_in_flight_passes,
    recomputed_layer_bytes,
    stage_activation_bytes,
)
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.estimate.rank_jobs import ROWS, TOKENS, peak_saved_bytes
from tests.estimate.shapes import released

WIDE = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8}
EXPERTS = WIDE | {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 4}
MODELS = {
    "llama": ("llama", WIDE),
    "qwen3": ("qwen3", WIDE | {"num_key_value_heads": 4}),
    "moe": ("qwen3_moe", EXPERTS),
    "moe, dense layer": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [1]}),
}
CASES = [
    ("llama", "bfloat16", {}, 1),
    ("llama", "float32", {"tensor": 2}, 2),
    ("qwen3", "bfloat16", {"tensor": 2, "sequence_parallel": True}, 1),
    ("qwen3", "float32", {"context": 2}, 1),
    ("qwen3", "bfloat16", {"pipeline": 2}, 4),
    ("qwen3", "bfloat16", {"pipeline": 2, "virtual_pipeline": 2}, 4),
    ("moe", "bfloat16", {"data": 2}, 1),
    ("moe, dense layer", "float32", {"tensor": 2, "sequence_parallel": True, "expert": 2}, 1),
    ("moe", "bfloat16", {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2}, 1),
    ("llama", "bfloat16", {"recompute": Recompute.selective}, 1),
    ("moe, dense layer", "bfloat16", {"data": 2, "recompute": Recompute.selective}, 1),
    ("qwen3", "bfloat16", {"recompute": Recompute.full}, 1),
    ("qwen3", "float32", {"pipeline": 2, "recompute": Recompute.full}, 4),
]
QUICK = [CASES[number] for number in (1, 3, 5, 7, 9, 12)]
"""A case for each axis, each way to recompute, both dtypes, and experts."""


@pytest.mark.parametrize(
    ("name", "dtype", "cut", "num_micro_batches"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.extended) for case in CASES],
)
def test_activations_are_those_of_autograd(name, dtype, cut, num_micro_batches, folders, rank_pool):
    layout = ParallelConfig(**cut)
    shape = ModelShape.from_folder(folders(name))
    kernels = KernelConfig(item_bytes=2 if dtype == "bfloat16" else 4, fused=False)
    arguments = str(folders(name)), layout, dtype, num_micro_batches
    found = rank_pool.run(peak_saved_bytes, layout.world_size, *arguments)
    tokens = ROWS * TOKENS // layout.context
    for stage in range(layout.pipeline):
        expected = stage_activation_bytes(
            shape, layout, stage, tokens, kernels, num_micro_batches=num_micro_batches
        )
        # The backward pass of the last layer computes its activations while all others are saved,
        # save for those of the final norm.
        expected += recomputed_layer_bytes(shape, layout, tokens, kernels)
        got = [saved for at, saved in found if at == stage]
        # Routing is not even, so that ranks with experts differ; their mean does not.
        tolerance = 0.06 if layout.recompute is Recompute.none else 0.1
        assert sum(got) / len(got) == pytest.approx(expected, rel=tolerance), (got, expected)


@pytest.fixture
def qwen3(folders):
    return ModelShape.from_folder(folders("qwen3"))


def test_a_dense_layer_keeps_the_bytes_worked_out_by_hand(folders):
    """Widths of the rank: queries 64, keys 32, MLP 160; 128 hidden; bf16, fused."""
    shape = ModelShape.from_folder(folders("llama"))
    norms = 2 * (3 * 128 * 2 + 4)
    rotary = 4 * 16 * 2
    attention = (64 + 16) * 2 + 64 * 2 + 4 * 4 + (64 + 2 * 16) * 2
    mlp = 3 * 160 * 2
    layout = ParallelConfig(tensor=2)
    got = layer_activation_bytes(shape, layout, 10, KernelConfig(), layer=0)
    assert got == 10 * (norms + rotary + attention + mlp)


def test_activations_that_a_dense_layer_drops_are_computed_again(folders):
    """The dense layer worked out above: 10 tokens of 128 hidden, 160 in the MLP."""
    shape, mlp = ModelShape.from_folder(folders("llama")), 10 * 3 * 160 * 2

    def layer_bytes(recompute):
        layout = ParallelConfig(tensor=2, recompute=recompute)
        saved = layer_activation_bytes(shape, layout, 10, KernelConfig(), layer=0)
        return saved, recomputed_layer_bytes(shape, layout, 10, KernelConfig())

    (saved, dropped), selective, full = map(layer_bytes, Recompute)
    assert dropped == 0
    assert selective == (saved - mlp, mlp)
    assert full == (10 * 128 * 2, saved - 10 * 128 * 2)


@pytest.mark.parametrize(
    ("cut", "stage", "num_micro_batches", "expected"),
    [
        ({}, 0, 8, [1]),
        ({"pipeline": 4}, 0, 8, [4]),
        ({"pipeline": 4}, 3, 8, [1]),
        ({"pipeline": 4}, 0, 2, [2]),
        ({"pipeline": 2, "virtual_pipeline": 2}, 0, 8, [3, 2]),
        ({"pipeline": 2, "virtual_pipeline": 2}, 1, 8, [2, 1]),
        ({"pipeline": 2, "virtual_pipeline": 2}, 0, 2, [2, 2]),
    ],
)
def test_earlier_stages_have_more_passes_in_flight(cut, stage, num_micro_batches, expected):
    assert num_in_flight_passes(ParallelConfig(**cut), stage, num_micro_batches) == expected


@pytest.mark.parametrize("fused", [True, False])
def test_tensor_and_sequence_ranks_share_activations(qwen3, fused):
    kernels = KernelConfig(fused=fused)

    def kept(**cut):
        return layer_activation_bytes(qwen3, ParallelConfig(**cut), 64, kernels, 0)

    shared = {"tensor": 2, "sequence_parallel": True}
    assert kept() > kept(tensor=2) > kept(**shared) > kept(**(shared | {"tensor": 4}))


def test_fused_kernels_keep_less(qwen3):
    fused, plain = (
        layer_activation_bytes(qwen3, ParallelConfig(), 64, KernelConfig(fused=fused), 0)
        for fused in (True, False)
    )
    assert fused < 0.8 * plain


def test_context_ranks_gather_keys_and_values(qwen3):
    one = layer_activation_bytes(qwen3, ParallelConfig(), 64, KernelConfig(), 0)
    two = layer_activation_bytes(qwen3, ParallelConfig(context=2), 64, KernelConfig(), 0)
    # Keys and values of 2.5 times as many tokens, gathered apart from what they are cut from.
    query, key = 8 * 16, 4 * 16
    assert two - one == 64 * 2 * (1.5 * key + 2.5 * key - (query + key))


def test_uneven_routing_costs_the_busiest_rank(folders):
    shape = ModelShape.from_folder(folders("moe, dense layer"))
    layout = ParallelConfig(expert=2, data=2)

    def kept(layer, imbalance):
        return layer_activation_bytes(shape, layout, 64, KernelConfig(), layer, imbalance=imbalance)

    assert kept(0, 2.0) - kept(0, 1.0) == 64 * 4 * ((128 + 3 * 64) * 2 + 12)
    assert kept(1, 2.0) == kept(1, 1.0), "a dense layer routes nothing"


def test_a_layers_workspace_is_that_of_its_largest_products(qwen3, folders):
    def workspace(shape):
        return layer_backward_workspace_bytes(shape, ParallelConfig(), 10, KernelConfig())

    assert workspace(qwen3) == 10 * (3 * 320 + 128) * 2
    stacked = 8 * 2 * 64 * 128
    experts = ModelShape.from_folder(folders("moe"))
    assert workspace(experts) == (40 * (3 * 64 + 2 * 128) + 2 * stacked) * 2
    mixed = ModelShape.from_folder(folders("moe, dense layer"))
    assert workspace(mixed) >= workspace(dataclasses.replace(mixed, moe=None))


def test_scratch_limits_are_those_of_the_kernels():
    bounds = vocab_tiles.SCRATCH_BYTES
    assert {True: bounds["cuda"], False: bounds["cpu"]} == SCRATCH_BYTES


def test_the_tile_and_scratch_are_those_of_the_triton_kernel():
    vocab_triton = pytest.importorskip("mega_agentrl.actor.vocab.triton_kernel")
    hidden_ND = torch.empty(20_000, 8, dtype=torch.bfloat16)
    rows = 18_992
    step = vocab_triton.chunk_tokens(hidden_ND, rows, SCRATCH_BYTES[True])
    block, scratch = _tile_size(rows, 20_000, KernelConfig())
    assert scratch == min(step, 20_000) * block * 2
    assert scratch <= SCRATCH_BYTES[True]
    assert block <= rows


@pytest.mark.parametrize(("rows", "tokens"), [(50_000, 4096), (61, 30), (61, 500_000)])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_the_tile_and_scratch_are_those_of_the_torch_kernel(rows, tokens, item_bytes):
    dtype = torch.bfloat16 if item_bytes == 2 else torch.float32
    scratch = vocab_torch._TileScratch(
        torch.empty(tokens, 1, dtype=dtype), rows, SCRATCH_BYTES[False]
    )
    kernels = KernelConfig(item_bytes=item_bytes, fused=False)
    block, num_bytes = _tile_size(rows, tokens, kernels)
    assert num_bytes == scratch._buffer.numel() * 4
    assert block == max(part.stop - part.start for part in scratch.blocks)


def test_the_head_needs_far_less_than_whole_logits():
    shape, tokens = released("qwen3-32b"), 16384
    logits = tokens * shape.vocab_size // 4 * 4
    once, twice = (
        head_workspace_bytes(shape, 4, number, KernelConfig()) for number in (tokens, 2 * tokens)
    )
    assert once < 1.1 * logits
    # Only the gradient of the hidden states grows with the tokens.
    assert twice - once == tokens * shape.hidden_size * 6
