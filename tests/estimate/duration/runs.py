"""Runs whose duration is predicted, and predictions of them for H100s."""

from __future__ import annotations

from mega_agentrl.estimate.device import DeviceSpec
from mega_agentrl.estimate.duration.passes import PolicyModel
from mega_agentrl.estimate.duration.rollout import EngineModel
from mega_agentrl.estimate.duration.speeds import SPEEDS
from mega_agentrl.estimate.duration.step import predict_step
from mega_agentrl.estimate.duration.workload import Workload
from tests.estimate.configs import configured
from tests.estimate.shapes import released

H100 = SPEEDS["H100"]
GOOD = {"tensor": 4, "sequence_parallel": True, "data": 8, "engine": 4, "engines": 8}


def workload(**changes):
    """1,024 trajectories of 2,000 prompt tokens and 1,000 sampled ones, all equally long."""
    sizes = {
        "num_prompts": 64, "group_size": 16, "prompt_tokens": 2000.0, "response_tokens": 1000.0,
        "max_response_tokens": 1000.0, "sampled_tokens": 1000.0,
    }  # fmt: skip
    return Workload(**(sizes | changes))


def policy(name="qwen3-32b", *, speeds=H100, config=None, of=None, **layout):
    return PolicyModel(
        config=config or configured(**layout),
        shape=released(name),
        device=DeviceSpec(),
        speeds=speeds,
        workload=of or workload(),
    )


def engine(name="qwen2.5-7b", config=None, **sizes):
    return EngineModel(
        config=config or configured(**sizes),
        shape=released(name),
        device=DeviceSpec(),
        speeds=H100,
    )


def step_of(config, name="qwen3-32b", of=None, **more):
    return predict_step(config, released(name), DeviceSpec(), H100, of or workload(), **more)
