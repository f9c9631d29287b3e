"""The Triton attention of trees: its plan here, its kernels in an interpreter and compiled."""

from __future__ import annotations

import os
import re
import subprocess
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.actor.model import packed_attention as attention
from mega_agentrl.actor.model.attention_plan import (
    BLOCK_TOKENS,
    Branch,
    make_block_sparse_plan,
    subtree_ends,
)
from mega_agentrl.actor.model.packed_attention import packed_attention, resolve_tree_attention
from mega_agentrl.actor.parallel.context_parallel import rank_token_indices
from mega_agentrl.config.enums import TreeAttention
from mega_agentrl.errors import InputError
from tests.actor.circles import mark_extended
from tests.config.refusals import refused_setting
from tests.rank_shards import pack_rows
from tests.tree_batches import make_tree_batch, paths_of, tree_params, tree_shapes
from tests.triton_interpreter import run_in_interpreter

triton = pytest.importorskip("triton")

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_subtree_ends_behind_its_last_descendant():
    branches = (
        Branch(start=0, stop=4, path=()),  # 0 1 2 3
        Branch(start=4, stop=6, path=((0, 2),)),  # 0 1 4 5
        Branch(start=6, stop=7, path=((0, 2), (4, 5))),  # 0 1 4 6
        Branch(start=7, stop=9, path=((0, 1),)),  # 0 7 8
        Branch(start=9, stop=10, path=()),  # another tree
    )
    assert subtree_ends(branches).tolist() == [9, 7, 4, 4, 7, 6, 7, 9, 9, 10]


@settings(max_examples=50)
@given(trees=tree_shapes())
def test_the_tokens_up_to_the_end_are_those_with_a_token_on_their_path(trees):
    batch = make_tree_batch(trees)
    branches = pack_rows(batch, range(batch.num_rows), batch.mask_BT, CPU).branches
    end_W, paths = subtree_ends(branches).tolist(), paths_of(branches)
    for token, path in enumerate(paths):
        assert path == [key for key in range(token + 1) if token < end_W[key]]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 2), data=st.data())
def test_lists_hold_the_blocks_with_visible_scores(seed, size, data):
    from tests.actor.model.tree_attention_cases import random_trees

    rank = data.draw(st.integers(0, size - 1))
    starts, branches = random_trees(seed, multiple=2 * size)
    plan = make_block_sparse_plan(starts, branches, rank, size, CPU)
    held_S = rank_token_indices(starts, rank, size)
    assert plan.token_S[: plan.num_queries].tolist() == held_S.tolist()
    key_W, end_W = torch.arange(starts[-1]), subtree_ends(branches)
    visible_SW = (key_W <= held_S[:, None]) & (held_S[:, None] < end_W)
    for lists, mask in (
        (plan.keys_of_queries, visible_SW),
        (plan.queries_of_keys, visible_SW.T),
    ):
        rows = mask.split(BLOCK_TOKENS)
        assert len(lists.bounds) == 2 * len(rows) + 1
        for number, row in enumerate(rows):
            tiles = row.split(BLOCK_TOKENS, dim=1)
            whole = [tile.shape == (BLOCK_TOKENS, BLOCK_TOKENS) for tile in tiles]
            full = {n for n, tile in enumerate(tiles) if whole[n] and bool(tile.all())}
            live = {n for n, tile in enumerate(tiles) if bool(tile.any())}
            first, middle, last = lists.bounds[2 * number : 2 * number + 3].tolist()
            masked = lists.block_L[first:middle].tolist()
            assert lists.block_L[middle:last].tolist() == sorted(full)
            # With context parallelism a block of queries may span a gap.
            assert set(masked) >= live - full if size > 1 else masked == sorted(live - full)


CASES = {
    "small": ("float32", ["check_small_trees"]),
    "large": ("float32", ["check_large_trees", "check_context_ranks"]),
    "bfloat16": (
        "bfloat16",
        [
            "check_small_trees",
            "check_context_ranks",
            "check_masked_blocks_are_not_loaded",
            "check_equal_inputs_give_equal_bits",
        ],
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        "small",
        pytest.param("large", marks=pytest.mark.extended),
        pytest.param("bfloat16", marks=pytest.mark.slow(12)),
    ],
)
def test_the_kernels_pass_their_checks_in_the_interpreter(case):
    dtype, checks = CASES[case]
    run_in_interpreter("tests/actor/model/tree_attention_cases.py", dtype, *checks)


def compiled(kernel, width, num_stages):
    """Compile a kernel for compute capability 9.0 with realistic sizes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mega_agentrl.actor.model.tree_attention import NUM_WARPS

    constants = {"HEADS": 32, "KV_HEADS": 8, "WIDTH": width}
    constants |= {"BLOCK": BLOCK_TOKENS, "WIDEN": False}
    types = dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32")
    types |= dict.fromkeys(("token_ptr", "end_ptr", "bounds_ptr", "block_ptr"), "*i32")
    types |= dict.fromkeys(("scale", "exponent_factor"), "fp32")
    endings = {"ptr": "*bf16", "desc": f"tensordesc<bf16[{BLOCK_TOKENS},1,{width}]>"}
    signature = {
        name: types.get(name, endings.get(name.rpartition("_")[2], "i32"))
        for name in kernel.arg_names
    }
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name.endswith(("_ptr", "_stride"))
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=even)
    options = {"num_warps": NUM_WARPS, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def used_resources(cubin, folder):
    """Return the line of a kernel's registers and memory; STACK and LOCAL are spilled registers."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(tool), "-res-usage", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "REG:" in line]
    return line


KERNELS = {
    "forward_kernel": "whole tiles",
    "query_gradient_kernel": "whole tiles",
    "key_value_gradient_kernel": "pieces",
}
"""How each kernel copies its inputs straight to shared memory."""


@pytest.mark.parametrize(
    ("name", "width"),
    mark_extended(
        product(KERNELS, attention.TRITON_HEAD_DIMS), quick=[("key_value_gradient_kernel", 64)]
    ),
)
def test_the_kernels_compile_to_hoppers_matrix_instructions(name, width, monkeypatch, tmp_path):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from mega_agentrl.actor.model import tree_attention_kernels as kernels
    from mega_agentrl.actor.model.tree_attention import HOPPER_STAGES, SHORT_STAGES

    copies_pieces = KERNELS[name] == "pieces"
    result = compiled(
        getattr(kernels, name), width, SHORT_STAGES if copies_pieces else HOPPER_STAGES
    )
    assembly = result.asm["ptx"]
    assert "wgmma.mma_async" in assembly
    copy = "cp.async.cg.shared.global" if copies_pieces else "cp.async.bulk.tensor.3d.shared"
    assert copy in assembly
    assert result.metadata.shared <= 227 << 10, "more than a Hopper block may have"
    resources = used_resources(result.asm["cubin"], tmp_path)
    # The gradients of keys and values need all registers, and a few that are spilled.
    spilled = int(re.search(r"STACK:(\d+) ", resources)[1])
    assert spilled <= (96 if copies_pieces and width == 128 else 0), resources
    assert "LOCAL:0 " in resources, resources


def test_keys_of_another_micro_batch_are_refused():
    from mega_agentrl.actor.model.tree_attention import tree_attention

    part = torch.zeros(4, 2, 64)
    with pytest.raises(InputError) as caught:
        tree_attention(part, part, part, tree_params((0, 5)))
    assert caught.value.got == [(4, 2, 64)] * 3


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim"),
    [(GPU, torch.bfloat16, 80), (GPU, torch.float32, 64), (CPU, torch.bfloat16, 64)],
    ids=["head size", "dtype", "device"],
)
def test_a_model_that_the_kernels_cannot_compute_is_refused(device, dtype, head_dim):
    arguments = (device, dtype, head_dim)
    got = refused_setting(resolve_tree_attention, TreeAttention.triton, *arguments)
    assert got == ("model.tree_attention", "triton")
    for choice in (TreeAttention.auto, TreeAttention.gather):
        assert resolve_tree_attention(choice, *arguments) is TreeAttention.gather


def test_the_choice_decides_on_the_kernel(monkeypatch):
    monkeypatch.setattr(attention, "_triton_attention", lambda query, *_: 0 * query + 7)
    query = torch.randn(4, 1, 2, 8)
    forked = (Branch(start=0, stop=3, path=()), Branch(start=3, stop=4, path=((0, 1),)))
    for trees, choice, is_used in (
        (tree_params((0, 4), forked), TreeAttention.triton, True),
        (tree_params((0, 4), forked), TreeAttention.gather, False),
        (tree_params((0, 3, 4)), TreeAttention.triton, True),
    ):
        out = packed_attention(query, query, query, trees, tree_attention=choice)
        assert bool((out == 7).all()) == is_used


def test_the_setting_reaches_attention_and_the_line_of_kernels(one_rank, monkeypatch):
    from mega_agentrl.actor.kernels import _attention_kernel
    from mega_agentrl.actor.model import gpt_model
    from mega_agentrl.config.sections.policy import ParallelConfig
    from tests.reshard.model_cuts import make_shape

    monkeypatch.setattr(gpt_model, "resolve_tree_attention", lambda choice, *_: choice)
    shape = make_shape(num_layers=1, hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=64)
    (chunk,) = gpt_model.build_model_chunks(
        shape, one_rank, ParallelConfig(), torch.float32, tree_attention=TreeAttention.triton
    )
    model = SimpleNamespace(shape=shape, dtype=torch.float32)
    assert _attention_kernel(model, list(chunk.modules())) == "Triton"
