"""Runs all preflight estimates of a configuration and collects the problems found.

To add a check that can refuse a run:

1. Write a function in this module that returns `PreflightProblem`s, and call it in `run_preflight`.
2. If configuration changes can solve the problem, search for them in `suggestions`, which verifies
   each change by an estimate.
3. Test the key that the problem names in `tests/estimate/preflight/test_preflight_report.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.config.checks.parallel import min_ranks_per_node
from mega_agentrl.estimate.device import GIB
from mega_agentrl.estimate.memory.engine import estimate_engine_memory
from mega_agentrl.estimate.memory.micro_batches import max_row_tokens
from mega_agentrl.estimate.memory.policy import estimate_critic_memory, estimate_policy_memory
from mega_agentrl.estimate.preflight.suggestions import (
    num_required_gpus,
    suggest_engine_changes,
    suggest_policy_changes,
)

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.device import DeviceSpec
    from mega_agentrl.estimate.memory.engine import EngineMemory
    from mega_agentrl.estimate.memory.policy import PolicyMemory
    from mega_agentrl.estimate.preflight.suggestions import ConfigChange, ConfigCheck
    from mega_agentrl.reshard.mapping.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class PreflightProblem:
    """A reason why the configuration cannot run."""

    config_key: str
    """The configuration key to change."""
    message: str
    """The estimate, the expected value and the cause of the problem."""
    suggestions: tuple[str, ...] = ()
    """Descriptions of changes that solve the problem."""
    is_searched: bool = False
    """Whether changes were searched for; if True, empty `suggestions` mean that no change helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport:
    """The estimates of a configuration and the problems found."""

    num_gpus: int
    """Number of GPUs that the run needs."""
    policy: list[PolicyMemory]
    """Memory of the policy by pipeline stage."""
    critic: list[PolicyMemory]
    """Memory of the critic by pipeline stage; empty without a critic."""
    engine: EngineMemory
    """Memory of an engine rank, which is the same for all of them."""
    problems: list[PreflightProblem]
    """Reasons why the run cannot start; empty if it can start."""
    notes: list[str]
    """Other remarks for the user."""


def run_preflight(
    config: TrainConfig,
    shape: ModelShape,
    device: DeviceSpec,
    check: ConfigCheck,
    *,
    num_gpus: int | None = None,
    imbalance: float = 1.0,
) -> PreflightReport:
    """Estimate the memory of policy, critic and engine, and search for changes that make them fit.

    Args:
        config: The run.
        shape: The model.
        device: The device of a rank.
        check: Raises `ValueError` for a configuration that cannot run for other reasons.
        num_gpus: Number of available GPUs; None if unknown.
        imbalance: Tokens of the busiest expert rank divided by the mean.
    """
    policy = estimate_policy_memory(config, shape, device, imbalance=imbalance)
    engine = estimate_engine_memory(config, shape, device)
    problems = _placement_problems(config, device, num_gpus)
    has_enough_gpus = num_gpus is not None and num_required_gpus(config) <= num_gpus
    check = _with_placement_check(check, device, num_gpus if has_enough_gpus else None)
    if (fullest := max(policy, key=lambda memory: memory.peak)).peak > device.usable_bytes:
        changes = suggest_policy_changes(config, shape, device, check, imbalance=imbalance)
        problems.append(_policy_problem(fullest, device, changes))
    problems += _engine_problems(config, shape, device, check, engine)
    return PreflightReport(
        num_gpus=num_required_gpus(config),
        policy=policy,
        critic=estimate_critic_memory(config, shape, device, imbalance=imbalance),
        engine=engine,
        problems=problems,
        notes=_notes(config, engine),
    )


def _placement_problems(
    config: TrainConfig, device: DeviceSpec, num_gpus: int | None
) -> list[PreflightProblem]:
    if not device.is_gpu:
        return []
    problems = []
    for key, size in (
        ("parallel.tensor", config.parallel.tensor),
        ("engine.tensor_parallel_size", config.engine.tensor_parallel_size),
    ):
        if size > device.gpus_per_node:
            problems.append(
                PreflightProblem(
                    key,
                    f"{key}={size}: expected at most {device.gpus_per_node}, the GPUs of a node, "
                    "because the ranks of a tensor-parallel group are on one node",
                    (f"{key}={device.gpus_per_node} (from {size})",),
                )
            )
    num_per_node = min_ranks_per_node(config)
    if not problems and num_per_node > device.gpus_per_node:
        tensor, engine_tensor = config.parallel.tensor, config.engine.tensor_parallel_size
        problems.append(
            PreflightProblem(
                "engine.tensor_parallel_size",
                f"engine.tensor_parallel_size={engine_tensor}: with parallel.tensor={tensor} and "
                f"cluster.colocated=true {num_per_node} ranks belong on one node, expected at "
                f"most {device.gpus_per_node}",
                (f"engine.tensor_parallel_size={tensor} (from {engine_tensor})",),
            )
        )
    num_needed = num_required_gpus(config)
    if num_gpus is not None and num_needed > num_gpus:
        problems.append(_too_few_gpus_problem(config, num_needed, num_gpus))
    return problems


def _with_placement_check(
    check: ConfigCheck, device: DeviceSpec, num_gpus: int | None
) -> ConfigCheck:
    """Return a check that also refuses configurations with placement problems."""

    def check_with_placement(config: TrainConfig) -> None:
        check(config)
        for problem in _placement_problems(config, device, num_gpus):
            raise ValueError(problem.message)

    return check_with_placement


def _too_few_gpus_problem(config: TrainConfig, num_needed: int, num_gpus: int) -> PreflightProblem:
    if config.cluster.colocated:
        message = f"{num_needed} GPUs needed, shared with the engines; {num_gpus} available"
        return PreflightProblem("parallel.data", message)
    tensor = config.engine.tensor_parallel_size
    num_training_gpus = num_needed - config.cluster.num_engines * tensor
    num_engines = (num_gpus - num_training_gpus) // tensor
    models = "policy and critic" if num_training_gpus > config.parallel.world_size else "the policy"
    message = (
        f"{num_needed} GPUs needed ({num_training_gpus} for {models}, cluster.num_engines="
        f"{config.cluster.num_engines} x engine.tensor_parallel_size={tensor} for engines); "
        f"{num_gpus} available"
    )
    if num_engines < 1:
        return PreflightProblem("parallel.data", message)
    suggestion = f"cluster.num_engines={num_engines} (from {config.cluster.num_engines})"
    return PreflightProblem("cluster.num_engines", message, (suggestion,))


def _policy_problem(
    memory: PolicyMemory, device: DeviceSpec, changes: list[ConfigChange]
) -> PreflightProblem:
    message = (
        f"policy rank of stage {memory.stage} needs {memory.peak / GIB:.1f} GiB of "
        f"{device.usable_bytes / GIB:.1f} usable"
    )
    parts = {
        "optim.micro_batch_tokens": memory.training_pass,
        "parallel.pipeline": memory.weights + memory.gradients + memory.optimizer,
        "weight_sync.bucket_mib": memory.transfer_buckets,
    }
    if memory.peak == memory.colocated_transfer_peak:
        message += " during the weight transfer: weights of policy and engine, and buckets"
        del parts["optim.micro_batch_tokens"]
    else:
        message += _colocated_note(memory.sleeping_engine, "a sleeping engine")
        message += _colocated_note(memory.offloaded_models, "models in host memory")
    key = max(parts, key=lambda name: parts[name])
    if changes:
        key = next(iter(changes[0].new_values))
    return PreflightProblem(key, message, tuple(map(str, changes)), is_searched=True)


def _colocated_note(num_bytes: int, owner: str) -> str:
    """Return the end of a message on the memory that the other model keeps on a shared GPU."""
    return f"; {num_bytes / GIB:.1f} of it are kept by {owner}" if num_bytes else ""


def _engine_problems(
    config: TrainConfig,
    shape: ModelShape,
    device: DeviceSpec,
    check: ConfigCheck,
    memory: EngineMemory,
) -> list[PreflightProblem]:
    messages = []
    if memory.peak > device.usable_bytes:
        messages.append(
            f"engine rank needs {memory.peak / GIB:.1f} GiB of {device.usable_bytes / GIB:.1f} "
            f"usable: engine.gpu_memory_utilization={config.engine.gpu_memory_utilization:g} is "
            f"{memory.vllm_share / GIB:.1f}, outside it {memory.outside_vllm_bytes / GIB:.1f}"
            + _colocated_note(memory.colocated_policy, "the offloaded policy")
        )
    if memory.num_kv_cache_tokens < config.engine.max_model_len:
        messages.append(
            f"engine rank has room for {memory.num_kv_cache_tokens} tokens of KV cache, expected "
            f"at least engine.max_model_len={config.engine.max_model_len}: "
            f"{memory.kv_cache / GIB:.1f} GiB are left of engine.gpu_memory_utilization="
            f"{config.engine.gpu_memory_utilization:g} after weights of {memory.weights / GIB:.1f}"
        )
    if not messages:
        return []
    changes = suggest_engine_changes(config, shape, device, check)
    key = next(iter(changes[0].new_values)) if changes else "engine.gpu_memory_utilization"
    return [PreflightProblem(key, "; ".join(messages), tuple(map(str, changes)), is_searched=True)]


def _notes(config: TrainConfig, memory: EngineMemory) -> list[str]:
    num_trajectories = memory.num_kv_cache_tokens // max(1, max_row_tokens(config))
    notes = []
    if 0 < num_trajectories < config.engine.max_num_seqs:
        notes.append(
            f"an engine's KV cache holds {num_trajectories} trajectories of full length at once; "
            f"engine.max_num_seqs={config.engine.max_num_seqs} trajectories fit only while they "
            "are shorter or share a prompt"
        )
    return notes


def tree_note(config: TrainConfig, mean_prompt_tokens: float) -> str | None:
    """Return a note on the tokens that `batch.trees` saves at least, or None if it may save none.

    For a prompt of p tokens with g responses of r tokens each, flat rows have g (p + r) tokens and
    a tree has p + g r. Shorter responses and forks save more. A tree that exceeds a micro-batch is
    cut into parts, each of which computes the prompt again.

    Args:
        config: The run.
        mean_prompt_tokens: Mean number of tokens of the prompts that are trained on.
    """
    group, response = config.rollout.group_size, config.rollout.max_response_tokens
    trains = config.total_steps or config.total_epochs
    if not (config.batch.trees and trains) or group == 1:
        return None
    budget = config.optim.micro_batch_tokens * config.parallel.context
    rows_per_part = max(1, int((budget - mean_prompt_tokens) / response))
    ratio, ratio_of_parts = (
        group * (mean_prompt_tokens + response) / (parts * mean_prompt_tokens + group * response)
        for parts in (1, ceil(group / rows_per_part))
    )
    cut_note = ""
    if rows_per_part < group:
        cut_note = f" (about {ratio_of_parts:.2f} as computed: full trees are cut to micro-batches)"
    return (
        f"batch.trees=true: the {group} trajectories of a prompt are computed as one tree; with "
        f"prompts of {mean_prompt_tokens:.0f} tokens on average tree/token_ratio is at least "
        f"{ratio:.2f}{cut_note}, higher with forks or responses shorter than {response} tokens"
    )
