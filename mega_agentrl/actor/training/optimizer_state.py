"""Uniform access to Adam's state in any of Megatron's optimizers.

The state of a parameter is `param` (the float32 value that Adam updates: the parameter itself
or its master weight), `exp_avg` and `exp_avg_sq`. A rank holds all elements of a parameter or,
under the distributed optimizer, one contiguous range of them. Writing into the views changes
the state.

The caller sets the number of steps. torch's Adam keeps it in one tensor per parameter, the
fused optimizers of Transformer Engine and Apex keep it in the group. (Megatron's own loading
with torch's Adam looks up a `step` that its checkpoints lack, and lets all parameters share one
tensor, which then advances once per parameter.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron.core.optimizer.optimizer import MegatronOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def reset_state(part: MegatronOptimizer) -> None:
    """Drop moments and step count; the next step recreates them."""
    part.optimizer.state.clear()
    for group in part.optimizer.param_groups:
        group.pop("step", None)


def state_tensors(part: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """Yield the updated tensors (master weights or parameters) and their existing moments."""
    for master in part.get_parameters():
        yield master
        for name in MOMENTS:
            if name in part.optimizer.state.get(master, {}):
                yield part.optimizer.state[master][name]


def state_shards(
    part: MegatronOptimizer,
) -> Iterator[tuple[torch.Tensor, int, dict[str, torch.Tensor]]]:
    """Yield this rank's state of each parameter; moments that do not exist yet are created as 0.

    Yields:
        (parameter, first, values), where `values` maps `param`, `exp_avg` and `exp_avg_sq` to
        `[n]` float32 views of elements first .. first + n - 1 of the flat parameter. Without the
        distributed optimizer that is the whole parameter.
    """
    inner = part.optimizer
    _init_missing_moments(part)
    for parameter, master in _param_master_pairs(part):
        first = 0
        if isinstance(part, DistributedOptimizer):
            first = part._get_model_param_range_map(parameter)["param"].start
        values = {"param": master, **{name: inner.state[master][name] for name in MOMENTS}}
        yield parameter, first, {name: value.detach().view(-1) for name, value in values.items()}


def set_num_steps(part: MegatronOptimizer, steps: int) -> None:
    """Set the step count and leave the moments unchanged."""
    inner = part.optimizer
    for group in inner.param_groups:
        if not isinstance(inner, torch.optim.AdamW):
            group["step"] = steps
            continue
        for master in group["params"]:
            step_device = master.device if group["fused"] else "cpu"
            inner.state[master]["step"] = torch.tensor(float(steps), device=step_device)


def _init_missing_moments(part: MegatronOptimizer) -> None:
    """Create missing moments as 0 and a missing step count as 0."""
    inner, fresh = part.optimizer, len(part.optimizer.state) == 0
    for master in part.get_parameters():
        for name in MOMENTS:
            if name not in inner.state[master]:
                inner.state[master][name] = torch.zeros_like(master, requires_grad=False)
    if fresh:
        set_num_steps(part, 0)


def _param_master_pairs(part: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (parameter, tensor that Adam updates for it) for the parameters of this rank."""
    if isinstance(part, DistributedOptimizer):
        groups = [
            *zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True),
            *zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True),
        ]
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        groups = [
            *zip(part.float16_groups, part.fp32_from_float16_groups, strict=True),
            *((group, group) for group in part.fp32_from_fp32_groups),
        ]
    else:
        groups = [(part.get_parameters(), part.get_parameters())]
    for parameters, masters in groups:
        yield from zip(parameters, masters, strict=True)
