"""Check lengths, groups, branching and staleness of the rollout (part of `check_config`).

Settings that would violate the staleness bound or another guarantee are errors. Training on stale
tokens without `algo.rollout_correction` raises a `UserWarning`, because it may be intended.
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
    OldLogProbs,
    RolloutCorrection,
)
from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

_ONE_OF_THREE = "only one of the three was changed"
_ONE_OF_TWO = "only one of the two was changed"


def check_lengths(config: TrainConfig, max_positions: int) -> None:
    """Raise a `ConfigError` unless the longest trajectory fits engine, micro-batch and model.

    The error describes all conflicts, and values of the settings that solve them together.
    """
    conflicts = _length_conflicts(config, max_positions)
    if not conflicts:
        return
    first = conflicts[0]
    others = [
        f"{'' if error.key == first.key else f'{error.key}={error.got}: '}{error.expected}"
        for error in conflicts[1:]
    ]
    raise ConfigError(
        first.key,
        first.got,
        "; and ".join([first.expected, *others]),
        "lengths chosen for another model or task" if others else first.cause,
        fitting_lengths(config, max_positions),
    )


def _length_conflicts(config: TrainConfig, max_positions: int) -> list[ConfigError]:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest = f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response}"
    limit, budget = config.engine.max_model_len, config.optim.micro_batch_tokens
    context = config.parallel.context
    shared = f", shared by parallel.context={context} ranks" if context > 1 else ""
    conflicts = []
    if prompt + response > limit:
        conflicts.append(
            ConfigError(
                "engine.max_model_len",
                limit,
                f"at least {prompt + response} = {longest}",
                "only one of the three was raised",
            )
        )
    if limit > max_positions or prompt + response > max_positions:
        conflicts.append(
            ConfigError(
                "engine.max_model_len",
                limit,
                f"at most {max_positions}, the model's max_position_embeddings",
                "a length chosen for another model",
            )
        )
    row, what = prompt + response, f"{longest}, the longest trajectory{shared}"
    if source := config.rollout.source_of_contexts:
        row = max(row, limit)
        what = f"engine.max_model_len={row}{shared} with {source}, whose sequences may be that long"
    if row > budget * context:
        conflicts.append(
            ConfigError(
                "optim.micro_batch_tokens",
                budget,
                f"at least {ceil(row / context)} = {what}",
                "a budget chosen for shorter trajectories",
            )
        )
    return conflicts


def fitting_lengths(config: TrainConfig, max_positions: int) -> dict[str, int]:
    """Return the lengths to change, with values that fit each other and the model.

    Prompts and responses are shortened only if the model cannot read both: the longer one if the
    other has at most half of the positions, else both by the same factor.
    """
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if prompt + response > max_positions:
        if min(prompt, response) > max_positions // 2:
            prompt = max_positions * prompt // (prompt + response)
        elif prompt > response:
            prompt = max_positions - response
        response = max_positions - prompt
    limit = min(max(config.engine.max_model_len, prompt + response), max_positions)
    row = limit if config.rollout.source_of_contexts else prompt + response
    budget = max(config.optim.micro_batch_tokens, ceil(row / config.parallel.context))
    fitting = {
        "data.max_prompt_tokens": (config.data.max_prompt_tokens, prompt),
        "rollout.max_response_tokens": (config.rollout.max_response_tokens, response),
        "engine.max_model_len": (config.engine.max_model_len, limit),
        "optim.micro_batch_tokens": (config.optim.micro_batch_tokens, budget),
    }
    return {key: new for key, (old, new) in fitting.items() if new != old}


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
    """Raise a `ConfigError` for an unusable rule or for settings that the rule would ignore."""
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


def check_agent(config: TrainConfig) -> None:
    """Raise a `ConfigError` for settings of the native loop that `rollout.agent` cannot keep."""
    rollout = config.rollout
    if not rollout.agent:
        return
    required = {
        "call_protocol": (CallProtocol.hermes, "agents get calls as JSON (rollout=hermes)"),
        "interaction_config_file": ("", "the agent itself talks to its users"),
        "partial_rollout": (False, "an agent cannot be paused between two steps"),
        "use_inference_chat_template": (False, "the agent sends the history that it wants"),
    }
    for key, (expected, cause) in required.items():
        got = getattr(rollout, key)
        if got != expected:
            raise ConfigError(f"rollout.{key}", got, f"{expected!r} with rollout.agent", cause)
    if rollout.branching is Branching.released:  # others: `agents.load.check_agent_branching`
        raise ConfigError(
            "rollout.branching",
            rollout.branching,
            "a rule that forks while the trajectory runs, such as after_result, with rollout.agent",
            "the rule starts forks in rounds of all prompts",
        )


def check_staleness(config: TrainConfig) -> None:
    """Raise a `ConfigError` for a setting that contradicts `rollout.max_staleness`."""
    staleness, in_flight = config.rollout.max_staleness, config.weight_sync.in_flight
    if not staleness:
        if in_flight:
            raise ConfigError(
                "weight_sync.in_flight",
                True,
                "False with rollout.max_staleness=0, where nothing is sampled while weights are "
                "sent (or on the policy's GPUs, with cluster.colocated)",
                "only one of the two was set",
            )
        return
    if config.rollout.partial_rollout:
        raise ConfigError(
            "rollout.partial_rollout",
            True,
            f"False with rollout.max_staleness={staleness}, because partial rollouts do not bound "
            "the age of trained tokens",
            "both ways to avoid waiting for stragglers were set",
        )
    if config.deterministic and (staleness > 1 or in_flight):
        cause = "weight_sync.in_flight=true" if in_flight else f"rollout.max_staleness={staleness}"
        raise ConfigError(
            "deterministic",
            True,
            f"False with {cause}, with which the weights that sample a token depend on timing",
            "settings of another run",
        )
    is_corrected = (
        config.algo.rollout_correction is not RolloutCorrection.none
        or config.algo.old_log_probs is OldLogProbs.engine
    )
    if not is_corrected:
        warnings.warn(
            f"algo.rollout_correction=none with rollout.max_staleness={staleness}: tokens of older "
            "weights are trained on without importance weights, which "
            "algo.rollout_correction=token_truncate adds; algo.old_log_probs=engine takes the "
            "ratios to the log-probs that they were sampled with",
            stacklevel=3,
        )
