"""All kernels copy the same bits and compute the same digests; see `copy_cases`."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.verify.copy_table import MatrixCopy
from tests.reshard.verify.copy_cases import CHECKS, GPU_CHECKS
from tests.triton_interpreter import run_in_interpreter


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_loop_for_cpus_passes_the_checks_of_every_kernel(check):
    check("cpu")


@pytest.mark.extended
def test_the_triton_kernel_passes_the_checks_in_its_interpreter():
    pytest.importorskip("triton")
    lines = run_in_interpreter("tests/reshard/verify/copy_cases.py")
    assert lines == [f"{check.__name__} passed" for check in GPU_CHECKS]


def test_the_triton_kernel_compiles_for_hopper(monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mega_agentrl.reshard.verify import triton_copy

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = triton_copy._copy_kernel
    constants = {"FIELDS": len(MatrixCopy._fields), "BLOCK": triton_copy.BLOCK}
    types = {"copies_ptr": "*i64", "address_ptr": "*i64", "num_row_factors": "i32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i32")
        for name in kernel.arg_names
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": triton_copy.NUM_WARPS},
    )
    assert "st.global.b32" in compiled.asm["ptx"]
    assert "st.global.b16" in compiled.asm["ptx"]
