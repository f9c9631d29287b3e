"""A few parameters, sharded like a model over one or two ranks, with known gradients.

    matrix [8, 6]  split by rows over tensor ranks     stage 0
    vector [5]     on every rank                       stage 0
    router [3, 6]  on every rank, a matrix             last stage
    tied   [4, 6]  a copy that the norm passes over    last stage
    expert [4, 6]  split by rows over expert ranks; optional

`Reference` is the same model unsharded, stepped by torch's AdamW.
"""

from __future__ import annotations

import math

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from mega_agentrl.config.sections.policy import OptimConfig

SHAPES = {"matrix": (8, 6), "vector": (5,), "router": (3, 6), "tied": (4, 6), "expert": (4, 6)}
SETTINGS = OptimConfig(lr=0.05, weight_decay=0.5, betas=[0.8, 0.9], grad_clip=2.0)


def whole(name, step=None):
    """Return the float32 start value of a parameter, or its gradient in a step."""
    seed = 100 * list(SHAPES).index(name) + (99 if step is None else step)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[name], generator=generator) * (
        1.0 if step is None else 3.0 ** (-step)
    )


class SmallModel(torch.nn.Module):
    """This rank's shards; the forward pass sums the squares of all parameters."""

    def __init__(self, coordinates, dtype, *, experts):
        super().__init__()
        mp_rank = coordinates.model_parallel_rank
        first, last = mp_rank.pipeline_rank == 0, mp_rank.pipeline_rank == mp_rank.pipeline_size - 1
        names = ["matrix", "vector"] * first + ["router", "tied"] * last + ["expert"] * experts
        self.cuts = {}
        for name in names:
            rank, size = {
                "matrix": (mp_rank.tensor_rank, mp_rank.tensor_size),
                "expert": (mp_rank.expert_rank, mp_rank.expert_size),
            }.get(name, (0, 1))
            rows = SHAPES[name][0] // size
            self.cuts[name] = slice(rank * rows, (rank + 1) * rows)
            parameter = torch.nn.Parameter(whole(name)[self.cuts[name]].to(dtype).contiguous())
            parameter.tensor_model_parallel = name in ("matrix", "expert")
            parameter.shared = name == "tied"
            parameter.allreduce = name != "expert"
            setattr(self, name, parameter)

    def forward(self):
        return sum(parameter.float().square().sum() for parameter in self.parameters())


def wrap(groups, dtype=torch.float32, *, distributed, experts=False, frozen=False):
    """Wrap the model in Megatron's data-parallel wrapper."""
    module = SmallModel(groups.coordinates, dtype, experts=experts).requires_grad_(not frozen)
    return DistributedDataParallel(
        config=TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True
        ),
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=distributed,
        ),
        module=module,
        pg_collection=groups.pg_collection,
    )


def fill(chunk, groups, step, poison=()):
    """Set this rank's gradients of a step and sum them over data ranks; NaN for `poison`."""
    coordinates = groups.coordinates
    for name, parameter in chunk.module.named_parameters():
        share = 1.0
        if coordinates.data_size == 2 and parameter.allreduce:
            share = 0.25 if coordinates.data_rank == 0 else 0.75
        parameter.main_grad.copy_(whole(name, step)[chunk.module.cuts[name]] * share)
        if name in poison:
            parameter.main_grad.view(-1)[-1] = math.nan
    chunk.finish_grad_sync()


class Reference:
    """The unsharded model: clips by the norm over `names`, then steps AdamW."""

    def __init__(self, names, dtype=torch.float32):
        self.masters = {name: whole(name).to(dtype).float() for name in names}
        matrices = [value for value in self.masters.values() if value.ndim > 1]
        vectors = [value for value in self.masters.values() if value.ndim == 1]
        self._adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.8, 0.9),
            eps=1e-8,
        )

    def step(self, number, lr):
        gradients = {name: whole(name, number) for name in self.masters}
        counted = [value.flatten() for name, value in gradients.items() if name != "tied"]
        norm = torch.cat(counted).double().norm().item()
        for name, master in self.masters.items():
            master.grad = gradients[name] * min(1.0, 2.0 / (norm + 1e-6))
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        return norm
