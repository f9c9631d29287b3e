"""The kernels that a built model computes with."""

import pytest
import torch

from tests.parallel.policy_jobs import run_calls
from tests.tiny_models import make_tiny_model

EXPERTS = {"qwen3": "", "qwen3_moe": "experts torch grouped_mm, "}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels of a CPU")
@pytest.mark.parametrize("name", EXPERTS)
def test_a_cpu_computes_with_the_kernels_of_torch(name, rank_pool, train_config, tmp_path):
    config = train_config(make_tiny_model(name, tmp_path / "model"))
    ((line,),) = rank_pool.run(run_calls, 1, config, [("kernels",)])
    assert line == (
        "attention torch padded blocks, norm torch, rope torch, optimizer torch AdamW, "
        f"gradients of weights torch addmm, {EXPERTS[name]}vocabulary head torch"
    )
