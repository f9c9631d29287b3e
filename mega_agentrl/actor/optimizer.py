"""Adam through Megatron-core: clipping over the whole model, non-finite steps skipped.

The gradient norm is taken over tensor and pipeline ranks, tied and replicated parameters
counted once; every rank sees the same number, so all skip or none. Weight decay spares
one-dimensional parameters. Float32 weights are stepped in place, bf16 ones through float32
masters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from mega_agentrl.actor import device

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from mega_agentrl.actor.groups import Groups
    from mega_agentrl.config.schema import OptimConfig


class PolicyOptimizer:
    """Steps this rank's parameters from the gradients in the data-parallel buffers."""

    def __init__(
        self, model: DistributedDataParallel, groups: Groups, settings: OptimConfig
    ) -> None:
        self._model = model
        self._settings = settings
        dtype = device.train_dtype()
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=1e-8,
                clip_grad=settings.grad_clip,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=False,
            ),
            [model],
            use_gloo_process_groups=False,
            pg_collection=groups.collection,
        )

    def zero_grad(self) -> None:
        """Empty the gradient buffers before the first micro-batch of a step."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip and step; the gradient norm before clipping, and whether a step was taken.

        A norm that is not finite leaves parameters and moments as they are.
        """
        found_inf = self._optimizer.prepare_grads()
        norm = self._optimizer.get_grad_norm()
        if found_inf or not math.isfinite(norm):
            return norm, False
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
        for part in self._optimizer.chained_optimizers:
            _scale_gradients(part.get_parameters(), self._settings.grad_clip / (norm + 1e-6))
        self._optimizer.step_with_ready_grads()
        return norm, True

    def reset(self) -> None:
        """Forget the moments and the step count."""
        for part in self._optimizer.chained_optimizers:
            part.optimizer.state.clear()

    def reload(self) -> None:
        """Take masters from the parameters after these were loaded."""
        self._optimizer.reload_model_params()


def _scale_gradients(parameters: list[torch.Tensor], factor: float) -> None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if factor < 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
