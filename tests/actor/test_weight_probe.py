"""The probe in bfloat16 with real models refuses wrong mappings of weights and no right ones.

Nor does it accept the right weights beside a lost tensor that is no parameter.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mega_agentrl.config.enums import Dtype
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig
from mega_agentrl.reshard.verify.weight_probe import check_probe, probe_prompt
from tests.actor.wrong_mappings import (
    WRONG_MAPPINGS,
    engine_log_probs,
    load_engine,
    lose_rotary_frequencies,
    with_wrong_mapping,
)
from tests.parallel.policy_jobs import run_calls
from tests.tiny_models import SIZES, make_tiny_model

pytestmark = pytest.mark.extended

PROMPT = probe_prompt(SIZES["vocab_size"], 32)


@pytest.fixture
def one_thread():
    """Let torch use one thread, which is faster for tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("num_models", [3, pytest.param(40, marks=pytest.mark.slow(14))])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_probe_refuses_wrong_mappings_and_no_right_ones(
    family, num_models, rank_pool, one_thread, tmp_path
):
    """The engine is transformers, which rounds elsewhere than Megatron and so routes otherwise."""
    folders = [make_tiny_model(family, tmp_path / f"{n}", seed=n) for n in range(num_models)]
    config = TrainConfig(model=ModelConfig(path=str(folders[0]), dtype=Dtype.bfloat16))
    calls = [
        call
        for folder in folders
        for call in (("load_hf", str(folder)), ("compute_prompt_log_probs", PROMPT))
    ]
    ((_, *answers),) = rank_pool.run(run_calls, 1, config, calls)
    wrong_mappings = WRONG_MAPPINGS | {"lost tensor": lose_rotary_frequencies}
    if family == "qwen3":
        del wrong_mappings["experts"]
    largest = []
    for folder, policy_logps in zip(folders, answers[::2], strict=True):
        engine = load_engine(folder)
        right = engine_log_probs(engine, PROMPT)
        check_probe("engine", policy_logps, right, "bfloat16")
        largest.append(np.abs(np.subtract(policy_logps, right)).max())
        for name, wrong_mapping in wrong_mappings.items():
            wrong = engine_log_probs(with_wrong_mapping(engine, wrong_mapping), PROMPT)
            with pytest.raises(ValueError):
                check_probe("engine", policy_logps, wrong, "bfloat16")
                pytest.fail(f"{folder}: {name}")
    if family == "qwen3_moe" and num_models > 10:
        assert max(largest) > 0.5, "no token of any model went to another expert"
