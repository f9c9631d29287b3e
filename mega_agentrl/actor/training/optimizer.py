"""Adam with Megatron-core: one gradient norm for the whole model; non-finite steps are skipped.

The norm covers tensor, pipeline, expert and data ranks and counts every parameter once:

    norm^2 = sum over all ranks of (sum of squares of the rank's gradients) / (their replicas)

There is 1 replica if the distributed optimizer shards the gradients over the data ranks, else
one per data rank; of tensor-parallel duplicates and tied embeddings only one copy is counted.
Every rank gets the same norm. A NaN or infinity in any gradient of any rank, counted or not,
makes the norm non-finite, so either all ranks skip a step or none does.

Weight decay excludes one-dimensional parameters (norms, biases). Float32 weights are updated in
place, bfloat16 weights through float32 master weights, which the distributed optimizer shards
over the data ranks. Experts have an optimizer of their own, because they are replicated over
other ranks.

Gradients are read from the reduced buffers; under the distributed optimizer only this rank's
shard of them.

The state of a parameter is `param` (the float32 value that Adam updates: the parameter itself
or its master weight), `exp_avg` and `exp_avg_sq`. A rank holds all elements of a parameter or,
under the distributed optimizer, one contiguous range of them. `AdamOptimizer.state_shards`
yields views: writing into them changes the state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch.nn.utils import get_total_norm

from mega_agentrl.actor import device, megatron_compat
from mega_agentrl.actor.training.offload import ALL_STATE, require_on_device
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from mega_agentrl.actor.parallel.process_groups import ParallelGroups
    from mega_agentrl.config.sections.policy import OptimConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamOptimizer:
    """Adam over this rank's parameters, with the gradients in the data-parallel buffers.

    `distributed` must agree with how the chunks were wrapped; master weights and moments are
    then sharded over the data ranks.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        groups: ParallelGroups,
        settings: OptimConfig,
        dtype: torch.dtype,
        *,
        distributed: bool,
    ) -> None:
        expected = chunks[0].ddp_config.use_distributed_optimizer
        if distributed != expected:
            raise InputError(
                "distributed",
                distributed,
                f"{expected}, as the chunks were wrapped",
                "parallel.distributed_optimizer was read in one place only",
            )
        self.num_steps = 0
        """Steps taken, without the skipped ones."""
        self.on_host: frozenset[str] = frozenset()
        """Parts of `offload.ALL_STATE` in host memory; set by the `Offloader`."""
        self._chunks = chunks
        self._config = settings
        self._groups = groups
        with megatron_compat.report_cuda_tensor_types():
            self._optimizer = get_megatron_optimizer(
                _megatron_optimizer_config(settings, dtype, distributed=distributed),
                chunks,
                use_gloo_process_groups=False,
                pg_collection=groups.pg_collection,
            )
        self._chained_optimizers: list[MegatronOptimizer] = self._optimizer.chained_optimizers
        for optimizer in self._chained_optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                _detach_master_shards(optimizer)
        self._configure_param_groups()

    @property
    def adam_class(self) -> type:
        """The class of torch, Apex or Transformer Engine that updates the parameters."""
        return type(self._chained_optimizers[0].optimizer)

    def zero_grad(self) -> None:
        """Zero the gradient buffers before the first micro-batch of a step."""
        require_on_device("zero_grad", {"gradients"}, self.on_host)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def release_grads(self) -> None:
        """Drop the views into the gradient buffers without changing their contents."""
        self._optimizer.zero_grad()

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip the gradients and take a step, unless the gradient norm is not finite.

        A skipped step leaves parameters, master weights, moments and the step count unchanged
        on every rank. Waits for all ranks of the layout, at most for the timeout of the groups.

        Returns:
            The gradient norm before clipping, and whether the step was taken.
        """
        require_on_device("step", ALL_STATE, self.on_host)
        self._optimizer.prepare_grads()
        norm = self._grad_norm()
        if not math.isfinite(norm):
            return norm, False
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        gradients = [
            gradient
            for optimizer in self._chained_optimizers
            for gradient in _main_grads(optimizer)
        ]
        _scale_gradients(gradients, self._config.grad_clip / (norm + 1e-6))
        self._optimizer.step_with_ready_grads()
        self.num_steps += 1
        return norm, True

    def reset(self) -> None:
        """Reset the moments and the step count."""
        require_on_device("reset", {"optimizer"}, self.on_host)
        for optimizer in self._chained_optimizers:
            optimizer.optimizer.state.clear()
            for group in optimizer.optimizer.param_groups:
                group.pop("step", None)
        self.num_steps = 0

    def reload_master_weights(self) -> None:
        """Copy the parameters to the master weights, after the parameters were loaded."""
        require_on_device("reload_master_weights", {"weights", "optimizer"}, self.on_host)
        self._optimizer.reload_model_params()

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield master weights and moments; float32 parameters are their own master weights."""
        for optimizer in self._chained_optimizers:
            state = optimizer.optimizer.state
            for master in optimizer.get_parameters():
                yield master
                yield from (
                    state[master][name] for name in MOMENTS if name in state.get(master, {})
                )

    def state_shards(self) -> Iterator[tuple[torch.Tensor, int, dict[str, torch.Tensor]]]:
        """Yield this rank's state of each parameter; missing moments are created as 0.

        Yields:
            (parameter, first, values), where `values` maps `param`, `exp_avg` and `exp_avg_sq`
            to `[n]` float32 views of elements first .. first + n - 1 of the flat parameter.
            Without the distributed optimizer that is the whole parameter.
        """
        require_on_device("state_shards", {"weights", "optimizer"}, self.on_host)
        for optimizer in self._chained_optimizers:
            yield from _state_shards(optimizer)

    def set_num_steps(self, num_steps: int) -> None:
        """Set the step count, after the state was written into the views of `state_shards`."""
        require_on_device("set_num_steps", {"weights", "optimizer"}, self.on_host)
        self.num_steps = num_steps
        for optimizer in self._chained_optimizers:
            _set_num_steps(optimizer, num_steps)

    def _configure_param_groups(self) -> None:
        """Set weight decay by group, and torch's fused Adam, also on CPUs."""
        for group in self._optimizer.param_groups:
            group["weight_decay"] = self._config.weight_decay * group["wd_mult"]
        for optimizer in self._chained_optimizers:
            if isinstance(optimizer.optimizer, torch.optim.Adam):  # AdamW is a subclass
                for group in optimizer.optimizer.param_groups:
                    group.update(fused=True, foreach=False)

    @torch.no_grad()
    def _grad_norm(self) -> float:
        """Compute the Euclidean norm over the whole model, bit-identical on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=device.current_device())
        for optimizer in self._chained_optimizers:
            counted_gradients = optimizer.get_grads_for_grad_norm()
            counted_ids = {id(gradient) for gradient in counted_gradients}
            other_gradients = [g for g in _main_grads(optimizer) if id(g) not in counted_ids]
            num_replicas = self._num_grad_replicas(optimizer)
            total += get_total_norm(counted_gradients).to(total).square() / num_replicas
            # Adds 0, or NaN if a gradient that does not count is not finite.
            total += get_total_norm(other_gradients).to(total) * 0.0
        everyone = self._groups.pg_collection.intra_dist_opt
        if everyone.size() > 1:
            dist.all_reduce(total, group=everyone)
        return math.sqrt(total.item())

    def _num_grad_replicas(self, optimizer: MegatronOptimizer) -> int:
        if isinstance(optimizer, DistributedOptimizer):
            return 1
        is_expert = any(group["is_expert_parallel"] for group in optimizer.param_groups)
        collection = self._groups.pg_collection
        return (collection.expt_dp if is_expert else collection.dp_cp).size()


def _megatron_optimizer_config(
    settings: OptimConfig, dtype: torch.dtype, *, distributed: bool
) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        clip_grad=settings.grad_clip,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        **settings.megatron,
    )


def _detach_master_shards(optimizer: DistributedOptimizer) -> None:
    """Detach the float32 shards from the parameters whose memory they share.

    Megatron slices them from the parameters under autograd, so that every access to their
    `grad` warns and each step would extend the autograd graph.
    """
    for shards, group in zip(
        optimizer.shard_fp32_groups, optimizer.optimizer.param_groups, strict=True
    ):
        for number, shard in enumerate(shards):
            detached = shard.detach()
            vars(detached).update(vars(shard))  # what Megatron has marked it with
            # The group's parameters start with the float32 shards, in the same order.
            shards[number] = group["params"][number] = detached


def _main_grads(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    return [master.grad for master in optimizer.get_parameters() if master.grad is not None]


def _scale_gradients(gradients: list[torch.Tensor], factor: float) -> None:
    if factor < 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


def _state_shards(
    optimizer: MegatronOptimizer,
) -> Iterator[tuple[torch.Tensor, int, dict[str, torch.Tensor]]]:
    adam = optimizer.optimizer
    _init_missing_moments(optimizer)
    for parameter, master in _param_master_pairs(optimizer):
        first = 0
        if isinstance(optimizer, DistributedOptimizer):
            first = megatron_compat.first_element(optimizer, parameter)
        values = {"param": master, **{name: adam.state[master][name] for name in MOMENTS}}
        yield parameter, first, {name: value.detach().view(-1) for name, value in values.items()}


def _set_num_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """Set the step count and leave the moments unchanged.

    torch's Adam keeps the count in one tensor per parameter, the fused optimizers of Transformer
    Engine and Apex keep it in the group. Megatron's own loading is not used, because with torch's
    Adam it lets all parameters share one tensor, which then advances once per parameter.
    """
    adam = optimizer.optimizer
    for group in adam.param_groups:
        if not isinstance(adam, torch.optim.Adam):
            group["step"] = steps
            continue
        for master in group["params"]:
            step_device = master.device if group["fused"] else "cpu"
            adam.state[master]["step"] = torch.tensor(float(steps), device=step_device)


def _init_missing_moments(optimizer: MegatronOptimizer) -> None:
    """Create missing moments as 0 and a missing step count as 0."""
    adam, is_new = optimizer.optimizer, len(optimizer.optimizer.state) == 0
    for master in optimizer.get_parameters():
        for name in MOMENTS:
            if name not in adam.state[master]:
                adam.state[master][name] = torch.zeros_like(master, requires_grad=False)
    if is_new:
        _set_num_steps(optimizer, 0)


def _param_master_pairs(
    optimizer: MegatronOptimizer,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (parameter, tensor that Adam updates for it) for the parameters of this rank."""
    if isinstance(optimizer, DistributedOptimizer):
        groups = [
            *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
            *zip(
                optimizer.model_float16_groups,
                optimizer.shard_fp32_from_float16_groups,
                strict=True,
            ),
        ]
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        groups = [
            *zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True),
            *((group, group) for group in optimizer.fp32_from_fp32_groups),
        ]
    else:
        groups = [(optimizer.get_parameters(), optimizer.get_parameters())]
    for parameters, masters in groups:
        yield from zip(parameters, masters, strict=True)
