"""Check lengths, groups, branching and staleness of the rollout (part of `check_config`).

Settings that would violate the staleness bound or another guarantee are errors. Training on stale
tokens without `algo.rollout_correction` is a `UserWarning`, because it may be intended.
"""

from __future__ import annotations

import warnings
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.config.algorithm_traits import BRANCHING_RULES
from mega_agentrl.config.enums import (
    Branching,
    CallProtocol,
    ForkBudgetMode,
    LossAggregation,
    RolloutCorrection,
)
from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

_ONE_OF_THREE = "only one of the three was changed"
_ONE_OF_TWO = "only one of the two was changed"


def check_lengths(config: TrainConfig, max_positions: int) -> None:
    """Raise a `ConfigError` unless the longest trajectory fits engine, micro-batch and model."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest = f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response}"
    limit = config.engine.max_model_len
    if prompt + response > limit:
        raise ConfigError(
            "engine.max_model_len",
            limit,
            f"at least {prompt + response} = {longest}",
            "only one of the three was raised",
        )
    budget, context = config.optim.micro_batch_tokens, config.parallel.context
    if prompt + response > budget * context:
        shared = f", shared by parallel.context={context} ranks" if context > 1 else ""
        raise ConfigError(
            "optim.micro_batch_tokens",
            budget,
            f"at least {ceil((prompt + response) / context)} = {longest}, the longest "
            f"trajectory{shared}",
            "a budget chosen for shorter trajectories",
        )
    if limit > max_positions:
        raise ConfigError(
            "engine.max_model_len",
            limit,
            f"at most {max_positions}, the model's max_position_embeddings",
            "a length chosen for another model",
        )


def check_groups(config: TrainConfig) -> None:
    """Raise a `ConfigError` if groups cannot be branched, compared or split as `config` says."""
    size = config.rollout.group_size
    roots = config.rollout.branch.initial_rollouts
    branches = config.rollout.branching is not Branching.none
    if branches and roots is not None and not 1 <= roots <= size:
        raise ConfigError(
            "rollout.branch.initial_rollouts",
            roots,
            f"1 to rollout.group_size={size}",
            "only one of them was changed",
        )
    if config.total_steps and size < 2 and config.algo.estimator.needs_groups:
        raise ConfigError(
            "rollout.group_size",
            size,
            "at least 2",
            f"algo.advantage={config.algo.advantage} compares the trajectories of one prompt and "
            "learns nothing from one",
        )
    _check_minibatches(config)


def _check_minibatches(config: TrainConfig) -> None:
    """Check that a step's trajectories can be split over optimizer steps and data ranks."""
    prompts, size = config.data.prompts_per_step, config.rollout.group_size
    rows, parts, data = prompts * size, config.optim.num_minibatches, config.parallel.data
    if rows % parts:
        raise ConfigError(
            "optim.num_minibatches",
            parts,
            f"a divisor of {rows} = data.prompts_per_step={prompts} * rollout.group_size={size}",
            _ONE_OF_THREE,
        )
    if rows // parts < data:
        raise ConfigError(
            "parallel.data",
            data,
            f"at most {rows // parts}, the trajectories of one optimizer step",
            "too many data-parallel ranks for data.prompts_per_step * rollout.group_size / "
            "optim.num_minibatches",
        )
    fraction = config.rollout.min_finished_fraction
    fewest = ceil(fraction * prompts) * size // parts
    if fewest < data:
        raise ConfigError(
            "rollout.min_finished_fraction",
            fraction,
            f"a fraction that leaves at least parallel.data={data} trajectories, not {fewest}, for "
            f"each of optim.num_minibatches={parts} optimizer steps",
            "a fraction too small for the number of data-parallel ranks",
        )


def check_branching(config: TrainConfig) -> None:
    """Raise a `ConfigError` for a rule that cannot be used, and settings that it would ignore."""
    rollout = config.rollout
    BRANCHING_RULES.check_options(rollout.branching, rollout.branching_options)
    if rollout.branching is not Branching.released:
        return
    required = {
        "call_protocol": CallProtocol.tags,
        "trajectory_timeout_s": 0,
        "use_inference_chat_template": False,
        "interaction_config_file": "",
        "straggler_timeout_s": 0,
        "partial_rollout": False,
        "max_staleness": 0,
    }
    for key, expected in required.items():
        got = getattr(rollout, key)
        if got != expected:
            raise ConfigError(
                f"rollout.{key}",
                got,
                f"{expected!r} with rollout.branching=released",
                "a setting of the asynchronous rollout, which the released rounds do not support",
            )
    if rollout.branch.fork_budget is not ForkBudgetMode.partitioned:
        raise ConfigError(
            "rollout.branch.fork_budget",
            rollout.branch.fork_budget,
            "partitioned with rollout.branching=released",
            "the released rounds distribute forks by their own rule and ignore the setting",
        )


def check_inference_template(config: TrainConfig) -> None:
    """Raise a `ConfigError` for settings that exclude trajectories whose turns are separate rows.

    A row may be as long as the engine's context, and a mean over rows would weight a trajectory by
    its number of turns.
    """
    if not config.rollout.use_inference_chat_template:
        return
    if config.algo.loss_aggregation is not LossAggregation.token_mean:
        raise ConfigError(
            "algo.loss_aggregation",
            config.algo.loss_aggregation,
            "token_mean with rollout.use_inference_chat_template=True, where a trajectory is "
            "several sequences",
            _ONE_OF_TWO,
        )
    budget, limit = config.optim.micro_batch_tokens, config.engine.max_model_len
    if budget * config.parallel.context < limit:
        raise ConfigError(
            "optim.micro_batch_tokens",
            budget,
            f"at least engine.max_model_len={limit} with "
            "rollout.use_inference_chat_template=True, whose sequences may be that long",
            "a budget chosen for shorter sequences",
        )


def check_staleness(config: TrainConfig) -> None:
    """Raise a `ConfigError` for a setting that asynchronous rollouts exclude."""
    staleness = config.rollout.max_staleness
    if not staleness:
        return
    if config.rollout.partial_rollout:
        raise ConfigError(
            "rollout.partial_rollout",
            True,
            f"False with rollout.max_staleness={staleness}, because partial rollouts do not bound "
            "the age of trained tokens",
            "both ways to avoid waiting for stragglers were set",
        )
    if config.deterministic and staleness > 1:
        raise ConfigError(
            "deterministic",
            True,
            f"rollout.max_staleness=1 or 0, not {staleness}, with which the weights that sample a "
            "token would depend on timing",
            "settings of another run",
        )
    if config.algo.rollout_correction is RolloutCorrection.none:
        warnings.warn(
            f"algo.rollout_correction=none with rollout.max_staleness={staleness}: tokens of older "
            "weights are trained on without importance weights, which "
            "algo.rollout_correction=token_truncate adds",
            stacklevel=3,
        )
