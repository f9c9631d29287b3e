"""Everything a preflight knows of a configuration, and what stands in its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.config.check_colocation import ranks_in_a_node
from mega_agentrl.estimate.change import num_ranks
from mega_agentrl.estimate.critic_memory import critic_memory
from mega_agentrl.estimate.device import GIB
from mega_agentrl.estimate.engine_advice import engine_changes
from mega_agentrl.estimate.engine_memory import engine_memory
from mega_agentrl.estimate.policy_advice import policy_changes
from mega_agentrl.estimate.policy_memory import longest_row, policy_memory

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.estimate.change import Change, Check
    from mega_agentrl.estimate.device import Device
    from mega_agentrl.estimate.engine_memory import EngineMemory
    from mega_agentrl.estimate.policy_memory import PolicyMemory
    from mega_agentrl.reshard.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Problem:
    """key: whose value cannot stay. message: what, got, expected. changes: that would do."""

    key: str
    message: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """policy, critic: by pipeline stage; the critic's [] without one. problems: empty where the
    run can start. notes: worth knowing."""

    num_gpus: int
    policy: list[PolicyMemory]
    critic: list[PolicyMemory]
    engine: EngineMemory
    problems: list[Problem]
    notes: list[str]


def judge(
    config: TrainConfig,
    shape: ModelShape,
    device: Device,
    check: Check,
    *,
    num_gpus: int | None = None,
    imbalance: float = 1.0,
) -> Verdict:
    """Estimate both sides and look for changes where one does not fit.

    check: raises `ValueError` for a configuration that cannot run for other reasons. num_gpus:
    that there are, where it is known. imbalance: tokens of the busiest expert rank over the mean.
    """
    policy = policy_memory(config, shape, device, imbalance=imbalance)
    engine = engine_memory(config, shape, device)
    problems = _places(config, device, num_gpus)
    allowed = num_gpus if num_gpus is None or num_ranks(config) <= num_gpus else None
    check = _with_places(check, device, allowed)
    if (fullest := max(policy, key=lambda memory: memory.peak)).peak > device.usable_bytes:
        changes = policy_changes(config, shape, device, check, imbalance=imbalance)
        problems.append(_policy_problem(fullest, device, changes))
    problems += _engine_problems(config, shape, device, check, engine)
    return Verdict(
        num_gpus=num_ranks(config),
        policy=policy,
        critic=critic_memory(config, shape, device, imbalance=imbalance),
        engine=engine,
        problems=problems,
        notes=_notes(config, engine),
    )


def _places(config: TrainConfig, device: Device, num_gpus: int | None) -> list[Problem]:
    if not device.is_gpu:
        return []
    found = []
    for key, size in (
        ("parallel.tensor", config.parallel.tensor),
        ("engine.tensor", config.engine.tensor),
    ):
        if size > device.per_node:
            found.append(
                Problem(
                    key,
                    f"{key}={size}: expected at most {device.per_node}, the GPUs of a machine, "
                    "which the ranks of a tensor group share",
                    (f"{key}={device.per_node} (from {size})",),
                )
            )
    together = ranks_in_a_node(config)
    if not found and together > device.per_node:
        found.append(
            Problem(
                "engine.tensor",
                f"engine.tensor={config.engine.tensor}: with parallel.tensor="
                f"{config.parallel.tensor} and cluster.colocated=true {together} ranks belong on "
                f"one machine, expected at most {device.per_node}",
                (f"engine.tensor={config.parallel.tensor} (from {config.engine.tensor})",),
            )
        )
    needed = num_ranks(config)
    if num_gpus is not None and needed > num_gpus:
        found.append(_too_many(config, needed, num_gpus))
    return found


def _with_places(check: Check, device: Device, num_gpus: int | None) -> Check:
    """The check, which a layout that has no place does not pass either."""

    def run(config: TrainConfig) -> None:
        check(config)
        for problem in _places(config, device, num_gpus):
            raise ValueError(problem.message)

    return run


def _too_many(config: TrainConfig, needed: int, num_gpus: int) -> Problem:
    if config.cluster.colocated:
        message = f"{needed} GPUs needed, which engines share, {num_gpus} there"
        return Problem("parallel.data", message)
    tensor = config.engine.tensor
    policy = needed - config.cluster.num_engines * tensor
    engines = (num_gpus - policy) // tensor
    who = "policy and critic" if policy > config.parallel.num_ranks else "the policy"
    message = (
        f"{needed} GPUs needed ({policy} for {who}, cluster.num_engines="
        f"{config.cluster.num_engines} x engine.tensor={tensor} for engines), {num_gpus} there"
    )
    if engines < 1:
        return Problem("parallel.data", message)
    fewer = f"cluster.num_engines={engines} (from {config.cluster.num_engines})"
    return Problem("cluster.num_engines", message, (fewer,))


def _policy_problem(memory: PolicyMemory, device: Device, changes: list[Change]) -> Problem:
    message = (
        f"policy rank of stage {memory.stage} needs {memory.peak / GIB:.1f} GiB of "
        f"{device.usable_bytes / GIB:.1f} usable"
    )
    parts = {
        "optim.micro_batch_tokens": memory.activations + max(memory.logits, memory.layer),
        "parallel.pipeline": memory.weights + memory.gradients + memory.optimizer,
        "weights.bucket_mib": memory.transfer,
    }
    if memory.peak == memory.both:
        message += " while weights are sent: its own and those of the engine on its GPU, buckets"
        del parts["optim.micro_batch_tokens"]
    else:
        message += _beside(memory.neighbour, "a sleeping engine")
    key = max(parts, key=lambda name: parts[name])
    if changes:
        key = next(iter(changes[0].settings))
    return Problem(key, message, tuple(map(str, changes)))


def _beside(num_bytes: int, who: str) -> str:
    return f", {num_bytes / GIB:.1f} of it what {who} leaves there" if num_bytes else ""


def _engine_problems(
    config: TrainConfig,
    shape: ModelShape,
    device: Device,
    check: Check,
    memory: EngineMemory,
) -> list[Problem]:
    messages = []
    if memory.peak > device.usable_bytes:
        messages.append(
            f"engine rank needs {memory.peak / GIB:.1f} GiB of {device.usable_bytes / GIB:.1f} "
            f"usable: engine.memory_fraction={config.engine.memory_fraction:g} is "
            f"{memory.share / GIB:.1f}, beside it {memory.outside / GIB:.1f}"
            + _beside(memory.neighbour, "the policy, off the GPU,")
        )
    if memory.cache_tokens < config.engine.max_model_len:
        messages.append(
            f"engine rank has room for {memory.cache_tokens} tokens of KV cache, expected at "
            f"least engine.max_model_len={config.engine.max_model_len}: "
            f"{memory.cache / GIB:.1f} GiB are left of engine.memory_fraction="
            f"{config.engine.memory_fraction:g} after weights of {memory.weights / GIB:.1f}"
        )
    if not messages:
        return []
    changes = engine_changes(config, shape, device, check)
    key = next(iter(changes[0].settings)) if changes else "engine.memory_fraction"
    return [Problem(key, "; ".join(messages), tuple(map(str, changes)))]


def _notes(config: TrainConfig, memory: EngineMemory) -> list[str]:
    rows = memory.cache_tokens // max(1, longest_row(config))
    notes = []
    if 0 < rows < config.engine.max_concurrent:
        notes.append(
            f"an engine's KV cache holds {rows} trajectories of full length at once; "
            f"engine.max_concurrent={config.engine.max_concurrent} run while they are shorter "
            "or share a prompt"
        )
    return notes
