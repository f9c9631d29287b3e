"""Adam's state in one form, whichever of Megatron's optimizers holds it.

Per parameter: `param` (the float32 value that is stepped: the parameter itself, or its
master), `exp_avg` and `exp_avg_sq`. A rank keeps all elements of a parameter, or under the
distributed optimizer one run of them. What is written into these views is the state.

The number of steps is told from outside. torch's Adam keeps it in a tensor per parameter, the
fused ones of Transformer Engine and Apex in the group. (Megatron's own loading with torch's
Adam looks up a `step` that its checkpoints lack, and lets all parameters share one tensor,
which then advances once per parameter.)
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


def forget(part: MegatronOptimizer) -> None:
    """Drop moments and step count; the next step makes them anew."""
    part.optimizer.state.clear()
    for group in part.optimizer.param_groups:
        group.pop("step", None)


def tensors(part: MegatronOptimizer) -> Iterator[torch.Tensor]:
    """What is stepped (masters, or the parameters themselves) and the moments there are."""
    for master in part.get_parameters():
        yield master
        for name in MOMENTS:
            if name in part.optimizer.state.get(master, {}):
                yield part.optimizer.state[master][name]


def shares(
    part: MegatronOptimizer,
) -> Iterator[tuple[torch.Tensor, int, dict[str, torch.Tensor]]]:
    """What this rank keeps of each parameter's state: (parameter, first element, values).

    values: `param` and the moments (0 where there were none), [n] float32 views of elements
    first .. first+n-1 of the flat parameter; all of it without the distributed optimizer.
    """
    inner = part.optimizer
    _fill(part)
    for parameter, master in _pairs(part):
        first = 0
        if isinstance(part, DistributedOptimizer):
            first = part._get_model_param_range_map(parameter)["param"].start
        values = {"param": master, **{name: inner.state[master][name] for name in MOMENTS}}
        yield parameter, first, {name: value.detach().view(-1) for name, value in values.items()}


def set_steps(part: MegatronOptimizer, steps: int) -> None:
    """Count as after `steps` steps; the moments are left as they are."""
    inner = part.optimizer
    for group in inner.param_groups:
        if not isinstance(inner, torch.optim.AdamW):
            group["step"] = steps
            continue
        for master in group["params"]:
            place = master.device if group["fused"] else "cpu"
            inner.state[master]["step"] = torch.tensor(float(steps), device=place)


def _fill(part: MegatronOptimizer) -> None:
    """Moments of 0 and no step where there was none yet, so that state has one form."""
    inner, fresh = part.optimizer, len(part.optimizer.state) == 0
    for master in part.get_parameters():
        for name in MOMENTS:
            if name not in inner.state[master]:
                inner.state[master][name] = torch.zeros_like(master, requires_grad=False)
    if fresh:
        set_steps(part, 0)


def _pairs(part: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, what is stepped in its stead), for parameters that this rank has a share of."""
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
