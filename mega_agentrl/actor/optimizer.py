"""Adam through Megatron-core: one gradient norm for the whole model, non-finite steps skipped.

The norm runs over tensor, pipeline, expert and data ranks; copies of a parameter count once:

    norm^2 = sum over all ranks of (sum of squares of the rank's gradients) / (their copies)

with 1 copy where the distributed optimizer has cut the gradients over the data ranks, else as
many as there are data ranks; of tensor-parallel duplicates and tied embeddings only one is
counted. Every rank gets the same number, and a NaN or infinity in any gradient of any rank,
counted or not, makes it one; so all skip a step or none does. Weight decay spares
one-dimensional parameters (norms, biases). Float32 weights are stepped in place, bf16 ones
through float32 masters, which the distributed optimizer cuts over the data ranks. Experts are
a part of their own, because other ranks are their replicas.

Gradients count as they are in the reduced buffers; under the distributed optimizer those of
this rank's share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.nn.utils import get_total_norm

from mega_agentrl.actor import device, optimizer_state
from mega_agentrl.actor.offload import EVERYTHING, require_on_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from mega_agentrl.actor.groups import Groups
    from mega_agentrl.config.schema import OptimConfig

_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "shared")


class PolicyOptimizer:
    """Steps this rank's parameters from the gradients in the data-parallel buffers.

    distributed: as the chunks were wrapped; masters and moments are then cut over data ranks.
    num_steps: steps taken, skipped ones not counted. on_host: what `Offload` has taken away.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        groups: Groups,
        settings: OptimConfig,
        dtype: torch.dtype,
        *,
        distributed: bool,
    ) -> None:
        wrapped = chunks[0].ddp_config.use_distributed_optimizer
        if distributed != wrapped:
            raise ValueError(
                f"distributed={distributed}: expected {wrapped}, as the chunks were wrapped; "
                "probable cause: parallel.distributed_optimizer was read in one place only"
            )
        self.num_steps = 0
        self.on_host: frozenset[str] = frozenset()
        self._chunks = chunks
        self._settings = settings
        self._groups = groups
        with device.cuda_type_names():
            self._optimizer = get_megatron_optimizer(
                _megatron_config(settings, dtype, distributed=distributed),
                chunks,
                use_gloo_process_groups=False,
                pg_collection=groups.collection,
            )
        self._parts: list[MegatronOptimizer] = self._optimizer.chained_optimizers
        for part in self._parts:
            if isinstance(part, DistributedOptimizer):
                _detach_shares(part)
        self._configure()

    def zero_grad(self) -> None:
        """Empty the gradient buffers before the first micro-batch of a step."""
        require_on_device("zero_grad", {"gradients"}, self.on_host)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def drop_grad(self) -> None:
        """Let go of the views into the gradient buffers, without touching their contents."""
        self._optimizer.zero_grad()

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip and step; the gradient norm before clipping, and whether a step was taken.

        A norm that is not finite leaves parameters, masters, moments and the step count as
        they are, on every rank.

        Waits for: all ranks of the layout. Unblocked by: them, or the groups' deadline.
        """
        require_on_device("step", EVERYTHING, self.on_host)
        self._optimizer.prepare_grads()
        norm = self._norm()
        if not math.isfinite(norm):
            return norm, False
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        gradients = [gradient for part in self._parts for gradient in _gradients(part)]
        _scale_gradients(gradients, self._settings.grad_clip / (norm + 1e-6))
        self._optimizer.step_with_ready_grads()
        self.num_steps += 1
        return norm, True

    def reset(self) -> None:
        """Forget the moments and the step count."""
        require_on_device("reset", {"optimizer"}, self.on_host)
        for part in self._parts:
            optimizer_state.forget(part)
        self.num_steps = 0

    def reload(self) -> None:
        """Take masters from the parameters after these were loaded."""
        require_on_device("reload", {"weights", "optimizer"}, self.on_host)
        self._optimizer.reload_model_params()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Masters and moments on this rank; in float32 the masters are the parameters."""
        for part in self._parts:
            yield from optimizer_state.tensors(part)

    def shares(self) -> Iterator[tuple[torch.Tensor, int, dict[str, torch.Tensor]]]:
        """(parameter, first element, values) as in `optimizer_state.shares`; writable views."""
        require_on_device("shares", {"weights", "optimizer"}, self.on_host)
        for part in self._parts:
            yield from optimizer_state.shares(part)

    def resume(self, num_steps: int) -> None:
        """Go on after `num_steps` steps, whose values have been written into `shares`."""
        require_on_device("resume", {"weights", "optimizer"}, self.on_host)
        self.num_steps = num_steps
        for part in self._parts:
            optimizer_state.set_steps(part, num_steps)

    def _configure(self) -> None:
        """Weight decay by group; torch's Adam in one pass over each tensor, also on CPUs."""
        for group in self._optimizer.param_groups:
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
        for part in self._parts:
            if isinstance(part.optimizer, torch.optim.AdamW):
                for group in part.optimizer.param_groups:
                    group.update(fused=True, foreach=False)

    @torch.no_grad()
    def _norm(self) -> float:
        """Euclidean norm over the whole model, the same bits on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=device.device())
        for part in self._parts:
            counted = part.get_main_grads_for_grad_norm()
            known = {id(gradient) for gradient in counted}
            others = [gradient for gradient in _gradients(part) if id(gradient) not in known]
            total += get_total_norm(counted).to(total).square() / self._num_copies(part)
            # Adds nothing, but not a number where one of them is not finite.
            total += get_total_norm(others).to(total) * 0.0
        dist.all_reduce(total, group=self._groups.collection.intra_dist_opt)
        return math.sqrt(total.item())

    def _num_copies(self, part: MegatronOptimizer) -> int:
        if isinstance(part, DistributedOptimizer):
            return 1
        expert = any(group["is_expert_parallel"] for group in part.param_groups)
        collection = self._groups.collection
        return (collection.expt_dp if expert else collection.dp_cp).size()


def _megatron_config(
    settings: OptimConfig, dtype: torch.dtype, *, distributed: bool
) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=1e-8,
        clip_grad=settings.grad_clip,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )


def _detach_shares(part: DistributedOptimizer) -> None:
    """Make float32 shares plain tensors over the parameters' memory.

    Megatron cuts them out of the parameters as autograd sees it, so that their `grad` warns
    at every access and each step would extend the graph's history.
    """
    for shares, group in zip(part.shard_fp32_groups, part.optimizer.param_groups, strict=True):
        for number, share in enumerate(shares):
            plain = share.detach()
            for name in _ATTRIBUTES:
                if hasattr(share, name):
                    setattr(plain, name, getattr(share, name))
            # The group's parameters start with the float32 shares, in the same order.
            shares[number] = group["params"][number] = plain


def _gradients(part: MegatronOptimizer) -> list[torch.Tensor]:
    return [master.grad for master in part.get_parameters() if master.grad is not None]


def _scale_gradients(gradients: list[torch.Tensor], factor: float) -> None:
    if factor < 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
