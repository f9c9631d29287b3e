"""Memory that trees add to a rank: measured allocations, and sizes by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mega_agentrl.actor.model.attention_plan import Branch
from mega_agentrl.actor.model.packed_attention import packed_attention
from mega_agentrl.actor.training.objectives import PolicyObjective
from mega_agentrl.actor.training.packing import pack_rows
from mega_agentrl.batch.packed_rows import POLICY_TARGETS, PackedRows, PackedTargets
from mega_agentrl.config.algorithm_traits import LOSSES
from mega_agentrl.config.enums import Recompute, TreeAttention
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.device import DeviceSpec
from mega_agentrl.estimate.memory.activations import (
    KernelConfig,
    attention_plan_bytes,
    path_attention_bytes,
    row_tensor_bytes,
    stage_activation_bytes,
)
from mega_agentrl.estimate.memory.policy import estimate_policy_memory
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.estimate.configs import configured
from tests.estimate.rank_jobs import peak_saved_bytes_of_tree
from tests.estimate.shapes import released
from tests.tree_batches import TreeShape, make_tree_batch, tree_params

MODELS = {
    "qwen3": (
        "qwen3",
        {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8}
        | {"num_key_value_heads": 4},
    )
}
FORKED = TreeShape(
    prompt_length=64, rows=((None, 0, 96), (0, 90, 30), (0, 40, 60), *((None, 0, 56),) * 5)
)


def peak_allocated(function):
    """Return the highest number of bytes that a call on the CPU had allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    allocations = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda allocation: allocation[0],
    )
    current = peak = 0
    for _, num_bytes in allocations:
        current += num_bytes
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("context", [1, 2])
def test_activations_of_a_forked_tree_are_within_the_estimate(context, dtype, folders, rank_pool):
    layout, shape = ParallelConfig(context=context), ModelShape.from_folder(folders("qwen3"))
    arguments = str(folders("qwen3")), layout, dtype, FORKED
    kernels = KernelConfig(
        item_bytes=2 if dtype == "bfloat16" else 4,
        fused=False,
        max_path_tokens=FORKED.prompt_length + 96,
    )
    for tokens, keys, saved in rank_pool.run(peak_saved_bytes_of_tree, context, *arguments):
        expected = stage_activation_bytes(shape, layout, 0, tokens, kernels, num_micro_batches=1)
        expected += attention_plan_bytes(tokens, keys, kernels)
        assert 0.8 * expected < saved <= expected


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
def test_attention_along_paths_allocates_no_more_than_is_counted(heads, kv_heads):
    """16 branches of 32 tokens, below a prompt of 512, against as many rows without a prompt."""
    branches = [Branch(start=0, stop=544, path=())]
    branches += [
        Branch(start=start, stop=start + 32, path=((0, 512),)) for start in range(544, 1024, 32)
    ]
    shape = replace(released("qwen3-4b"), num_heads=heads, num_kv_heads=kv_heads, head_dim=32)

    def measure(trees):
        query, key, value = (
            torch.randn(1024, 1, number, 32, requires_grad=True)
            for number in (heads, kv_heads, kv_heads)
        )
        out = packed_attention(query, key, value, trees)
        return peak_allocated(lambda: out.backward(torch.ones_like(out)))

    measured = measure(tree_params((0, 1024), tuple(branches)))
    measured -= measure(tree_params(tuple(range(0, 1025, 32))))
    kernels = KernelConfig(item_bytes=4, fused=False)
    counted = path_attention_bytes(shape, ParallelConfig(), 1024, 16 * 544, kernels)
    assert 0.5 * counted < measured <= counted


def test_attention_along_paths_takes_the_bytes_worked_out_by_hand():
    """28 query and 4 key heads of 128 numbers over 4 ranks, in two bytes; 100 keys, 10 tokens."""
    shape, layout = released("qwen2.5-7b"), ParallelConfig(tensor=4, context=2)

    def num_bytes(num_keys, fused):
        kernels = KernelConfig(fused=fused)
        return path_attention_bytes(shape, layout, 10, num_keys, kernels)

    summed = 2 * 2 * 10
    # Keys, values and their gradients; those of 7 query heads, which share a key head.
    assert num_bytes(100, fused=True) == (100 * (4 + 2 * 7) + summed) * 128 * 2
    assert num_bytes(100, fused=False) == (150 * 4 + summed) * 128 * 2
    assert num_bytes(0, fused=True) == 0


def test_the_plan_of_the_attention_takes_the_bytes_worked_out_by_hand():
    paths = KernelConfig(fused=False, max_path_tokens=50)
    assert attention_plan_bytes(10, 100, KernelConfig()) == 100 * 8
    # Slots of 150 keys and 15 queries, a slot for each token, and a mask of 10 x 50 scores.
    assert attention_plan_bytes(10, 100, paths) == (150 + 15 + 10) * 8 + 750 * 2
    assert attention_plan_bytes(10, 0, paths) == 0


def test_trees_add_keys_and_rows_to_the_memory_of_a_rank():
    config = configured(tensor=4, data=4, pipeline=2, sequence_parallel=True)
    config.model.tree_attention = TreeAttention.gather
    shape = released("qwen2.5-7b")
    first, last = estimate_policy_memory(config, shape, DeviceSpec())
    # 64 prompts x 16 rows over 4 ranks, 6,144 positions; the first stage has indices alone.
    assert first.row_tensors == 256 * 6144 * 24
    assert last.row_tensors == 256 * 6144 * (24 + 22 * 4)
    keys = 16 * 8192
    assert first.path_attention == (keys * (4 + 2 * 7) + 2 * 8192) * 128 * 2
    config.batch.trees = False
    flat, _ = estimate_policy_memory(config, shape, DeviceSpec())
    assert flat.path_attention == 0
    config.batch.trees, config.model.tree_attention = True, TreeAttention.auto
    triton, _ = estimate_policy_memory(config, shape, DeviceSpec())
    assert triton.path_attention == 0
    assert triton.activations == flat.activations
    unlike = replace(shape, head_dim=80)
    assert estimate_policy_memory(config, unlike, DeviceSpec())[0].path_attention > 0
    config.batch.trees = False
    assert flat.row_tensors == first.row_tensors
    assert first.activations - flat.activations == 2 * keys * 8, "two micro-batches in flight"


def test_a_layer_that_is_computed_again_keeps_its_activations_meanwhile():
    config, shape = configured(tensor=4, sequence_parallel=True), released("qwen2.5-7b")
    config.model.tree_attention = TreeAttention.gather
    (kept,) = estimate_policy_memory(config, shape, DeviceSpec())
    config.parallel.recompute = Recompute.full
    (memory,) = estimate_policy_memory(config, shape, DeviceSpec())
    added = memory.path_attention - kept.path_attention
    assert added == memory.layer_workspace - kept.layer_workspace > 0


BUILT_IN_LOSSES = LOSSES.registered()


def test_no_loss_allocates_more_row_tensors_than_are_counted():
    """16 rows of one tree, 1,024 positions, with every term of the objective."""
    num_rows, num_positions = 16, 1024
    tree = TreeShape(prompt_length=8, rows=((None, 0, num_positions),) * num_rows)
    batch = make_tree_batch((tree,))
    ones_BT = torch.ones_like(batch.old_logp_BT)
    batch = batch.with_fields(importance_weight_BT=ones_BT, mask_BT=ones_BT.bool())
    rows = PackedRows.from_batch(batch)
    targets = PackedTargets.from_batch(batch, rows.row_R, POLICY_TARGETS, ones_BT)
    micro = pack_rows(rows, range(num_rows), targets.mask_M, torch.device("cpu"))
    logp_N, entropy_N = (
        torch.full(micro.target_N.shape, value, requires_grad=True) for value in (-4.0, 1.0)
    )

    def backward(loss):
        objective = PolicyObjective(AlgoConfig(loss=loss, entropy_coef=0.01), targets, 1.0)
        to_rows = partial(micro.to_rows, num_positions=num_positions)
        objective(micro, to_rows(logp_N), to_rows(entropy_N))[0].backward()

    indices = sum(map(torch.numel, (micro.predicted_K, micro.row_K, micro.column_K))) * 8
    counted = row_tensor_bytes(num_rows, num_positions, has_loss=True)
    peaks = [peak_allocated(partial(backward, loss)) for loss in BUILT_IN_LOSSES]
    assert 0.95 * counted < max(peaks) + indices <= counted
    assert indices == row_tensor_bytes(num_rows, num_positions, has_loss=False)
