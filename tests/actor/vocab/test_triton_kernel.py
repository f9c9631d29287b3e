"""The kernels compiled, not run, for a GPU; `test_vocab_parallel` runs them in an interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from tests.actor.circles import mark_extended

triton = pytest.importorskip("triton")


@pytest.mark.parametrize("num_bytes", [1, 10_000, 512 << 20])
@pytest.mark.parametrize("num_rows", [0, 61, 151_936])
def test_a_chunk_fits_the_scratch(num_rows, num_bytes):
    from mega_agentrl.actor.vocab.triton_kernel import (
        MAX_CHUNK_TOKENS,
        MIN_BLOCK_ROWS,
        chunk_tokens,
    )

    tokens = chunk_tokens(torch.empty(0, 8, dtype=torch.bfloat16), num_rows, num_bytes)
    width = max(1, min(num_rows, MIN_BLOCK_ROWS))
    assert 1 <= tokens <= MAX_CHUNK_TOKENS
    assert tokens == 1 or tokens * width * 2 <= num_bytes
    assert tokens == MAX_CHUNK_TOKENS or (tokens + 1) * width * 2 > num_bytes


def compiled(kernel, **own):
    """Compile a kernel for compute capability 9.0 with realistic sizes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mega_agentrl.actor.vocab import triton_kernel

    tile = triton_kernel.HOPPER_TILE
    constants = {
        "HIDDEN": 4096,
        "TOKENS": tile.block_tokens,
        "ROWS": tile.block_rows,
        "STEP": tile.block_hidden,
        "WIDEN": False,
        "GROUP": 8,
        **own,
    }
    types = {"column_ptr": "*i32", "num_tokens": "i32", "num_rows": "i32"}
    for name, rows, columns in (
        ("hidden", tile.block_tokens, tile.block_hidden),
        ("weight", tile.block_rows, tile.block_hidden),
        ("grad", tile.block_tokens, tile.block_rows),
    ):
        types[f"{name}_desc"] = f"tensordesc<bf16[{rows},{columns}]>"
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*fp32")
        for name in kernel.arg_names
    }
    signature["inverse_temperature"] = "fp32"
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature[name].startswith(("*", "i"))
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=even)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


KERNELS = {
    "log-probs and entropy": ("_stats_kernel", {"RUN": 8}),
    "gradients of both": ("_gradient_kernel", {"WITH_ENTROPY": True}),
    "gradients of log-probs": ("_gradient_kernel", {"WITH_ENTROPY": False}),
}


@pytest.mark.parametrize("name", mark_extended(KERNELS, quick=["gradients of both"]))
def test_the_kernels_compile_to_hoppers_matrix_instructions(name, monkeypatch, tmp_path):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from mega_agentrl.actor.vocab import triton_kernel

    kernel, own = KERNELS[name]
    result = compiled(getattr(triton_kernel, kernel), **own)
    assembly = result.asm["ptx"]
    assert "wgmma.mma_async" in assembly
    assert "cp.async.bulk.tensor.2d.shared" in assembly, "no copies of whole tiles"
    assert result.metadata.shared <= 227 << 10, "more than a Hopper block may have"
