"""Configurations for the tests of the estimates: a recipe's, without files."""

from __future__ import annotations

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.estimate.memory.model_state import rank_parameters


def configured(*, prompt=2048, response=6144, tokens=8192, engine=1, engines=1, **cut):
    """A run of full rows; `cut` is that of the policy."""
    config = TrainConfig(parallel=ParallelConfig(**cut))
    config.data.prompts_per_step, config.data.max_prompt_tokens = 64, prompt
    config.rollout.group_size, config.rollout.max_response_tokens = 16, response
    config.optim.micro_batch_tokens = tokens
    config.engine.tensor_parallel_size, config.engine.max_model_len = engine, prompt + response
    config.engine.gpu_memory_utilization = 0.85
    config.cluster.num_engines = engines
    return config


def check_of(shape):
    """A check that lets every layout pass which the model and its ranks can be cut into."""

    def check(config):
        layout = config.parallel
        rank_parameters(shape, layout, 0)
        ranks = layout.tensor * layout.context * layout.data
        if ranks % (layout.expert * layout.expert_tensor_size):
            raise ValueError(f"parallel.expert={layout.expert}")
        if config.engine.tensor_parallel_size > shape.num_heads or config.cluster.num_engines < 1:
            raise ValueError(f"engine.tensor_parallel_size={config.engine.tensor_parallel_size}")

    return check
