"""One Megatron rank of the critic: a scalar value head on the body of a policy.

The value of response token t is computed from the hidden state that predicts t, so it depends
on the prompt and the response before t: it is V(s_t), as `algo.advantage.gae` expects. If the
checkpoint has no value head, the head starts with a weight of zero.

Arguments and results are plain values or CPU tensors, so that a remote call can carry them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.megatron_model import (
    MegatronModel,
    RankInfo,
    TrainableRank,
    summarize_steps,
)
from mega_agentrl.actor.model.heads import ScalarHead
from mega_agentrl.actor.training.objectives import aggregate_share, require_fields
from mega_agentrl.actor.training.packing import response_mask
from mega_agentrl.algo.value_loss import clipped_value_loss, explained_variance
from mega_agentrl.batch.micro_batching import minibatch_masks
from mega_agentrl.reshard.mapping.model_mapping import HF_SCORE_HEAD
from mega_agentrl.reshard.mapping.model_shape import ModelShape

if TYPE_CHECKING:
    from mega_agentrl.actor.training.packing import MicroBatch
    from mega_agentrl.actor.training.pipeline_schedule import MicroBatchStats
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch, UpdateStats

VALUE_CLIP_RANGE = 0.5
"""Clip range of the value loss around the old values, in units of the reward."""

VALUE_METRICS = ("value_loss", "value_clipfrac", "value", "return")


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """Clipped value loss of one optimizer step.

    The denominator is counted over `mask_BT`, so the loss does not depend on how the rows are
    split into micro-batches.
    """

    batch: TrainBatch
    """All rows; `value_BT` and `return_BT` are required."""
    mask_BT: torch.Tensor
    """`[B, T]` bool, the trained tokens of this step's rows."""
    clip_range: float
    """Largest distance from `value_BT` at which a value still gets a gradient."""
    aggregation: str
    """Mode of `algo.policy_loss.aggregate`."""

    def __post_init__(self) -> None:
        require_fields(
            self.batch, ("value_BT", "return_BT"), "update of the critic", "compute_values"
        )

    def __call__(
        self, micro: MicroBatch, value_RT: torch.Tensor
    ) -> tuple[torch.Tensor, MicroBatchStats]:
        """Return the 0-d loss of a micro-batch and its metrics, from `[R, T]` values."""
        rows, device = list(micro.rows), value_RT.device
        mask_RT = self.mask_BT[rows].to(device)
        # A context rank has values only for the tokens that it predicts.
        own_RT = micro.predicted_mask(value_RT.size(1))
        return_RT = self.batch.return_BT[rows].to(device)
        loss_RT, info = clipped_value_loss(
            value_RT, self.batch.value_BT[rows].to(device), return_RT, own_RT, clip=self.clip_range
        )
        loss = aggregate_share(loss_RT, mask_RT, self.mask_BT, self.aggregation)
        num_tokens = own_RT.sum().float()
        return loss, {
            "loss": loss.detach(),
            "num_tokens": num_tokens,
            "value_loss": loss_RT.detach().sum(),
            "value_clipfrac": info["value_clipfrac"] * num_tokens,
            "value": value_RT.detach().sum(),
            "return": return_RT[own_RT].sum(),
        }


class CriticRank(TrainableRank):
    """This process's shard of the critic; its weights are undefined until `load_hf`.

    `model_path` is the checkpoint of a policy or of a sequence classifier with one label.
    """

    def __init__(self, config: TrainConfig, rank_info: RankInfo, *, model_path: str) -> None:
        self._config = config
        shape = ModelShape.from_folder(model_path).with_scalar_head()
        self.megatron_model = MegatronModel(config, shape, rank_info)

    def load_hf(self, folder: str) -> None:
        """Load this rank's slices of a checkpoint with the same body and reset the optimizer."""
        self.megatron_model.load_hf(folder, fresh=(HF_SCORE_HEAD,))

    def reset_optimizer(self) -> None:
        """Reset Adam's moments and the step count."""
        self.megatron_model.reset_optimizer()

    def compute_values(self, batch: TrainBatch) -> tuple[list[int], torch.Tensor] | None:
        """Compute the value before every response token.

        Returns:
            Row numbers and their `[rows, T]` float32 values, 0 after the end of a row. One rank
            of the last pipeline stage of each data-parallel rank returns them, all others None.
        """
        width = batch.response_BT.size(1)
        scored = self.megatron_model.forward_only(
            batch, response_mask(batch), ScalarHead(num_positions=width)
        )
        if scored is None:
            return None
        rows, (value_BT,) = scored
        return rows, value_BT

    def update(self, batch: TrainBatch, lr: float | None = None) -> UpdateStats:
        """Take `optim.num_minibatches` steps on the clipped value loss, in row order.

        `lr` replaces `optim.critic_lr`. The metric `explained_variance` is that of the batch's
        values from before the update.
        """
        head = ScalarHead(num_positions=batch.response_BT.size(1))
        aggregation = str(self._config.algo.loss_aggregation)
        lr = self._config.optim.critic_lr if lr is None else lr
        results = []
        for mask_BT in minibatch_masks(batch.mask_BT, self._config.optim.num_minibatches):
            objective = ValueObjective(batch, mask_BT, VALUE_CLIP_RANGE, aggregation)
            results.append(
                self.megatron_model.train_step(
                    batch, mask_BT, head, objective, VALUE_METRICS, lr=lr
                )
            )
        stats = summarize_steps(results, VALUE_METRICS)
        explained = explained_variance(batch.value_BT, batch.return_BT, batch.mask_BT).item()
        return replace(stats, metrics={**stats.metrics, "explained_variance": explained})
