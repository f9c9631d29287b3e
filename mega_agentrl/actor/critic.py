"""One Megatron rank of the critic: a scalar value head on the body of a policy.

The value of response token t is computed from the hidden state that predicts t, so it depends
on the prompt and the response before t: it is V(s_t), as `algo.advantage.gae` expects. If the
checkpoint has no value head, the head starts with a weight of zero.

Arguments and results are plain values or numpy arrays, so that a remote call can carry them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mega_agentrl.actor.device import from_host
from mega_agentrl.actor.megatron_model import MegatronModel, RankInfo, TrainableRank
from mega_agentrl.actor.model.heads import ScalarHead
from mega_agentrl.actor.training.objectives import require_targets, trajectory_lengths
from mega_agentrl.actor.training.step_result import summarize_steps
from mega_agentrl.algo.masking import masked_sum
from mega_agentrl.algo.policy_loss import aggregate
from mega_agentrl.algo.value_loss import clipped_value_loss
from mega_agentrl.batch.packed_rows import CRITIC_TARGETS
from mega_agentrl.reshard.mapping.model_mapping import HF_SCORE_HEAD
from mega_agentrl.reshard.mapping.model_shape import ModelShape

if TYPE_CHECKING:
    from mega_agentrl.actor.training.packing import MicroBatch
    from mega_agentrl.actor.training.pipeline_schedule import MicroBatchStats
    from mega_agentrl.batch.packed_rows import PackedScores, PackedTargets
    from mega_agentrl.batch.row_sharding import ScoringShard, UpdateShard
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import UpdateStats

VALUE_CLIP_RANGE = 0.5
"""Clip range of the value loss around the old values, in units of the reward."""

VALUE_METRICS = ("value_loss", "value_clipfrac", "value", "return")


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """Clipped value loss of one optimizer step.

    The denominator is counted over the whole step, so the loss does not depend on how the rows are
    split into micro-batches.
    """

    targets: PackedTargets
    """Targets of the rows of the data rank; `value` and `return` are required."""
    denominator: float
    """Divisor of the loss."""
    clip_range: float
    """Largest distance from the old value at which a value still gets a gradient."""
    aggregation: str
    """Mode of `algo.policy_loss.aggregate`."""

    def __post_init__(self) -> None:
        require_targets(self.targets, CRITIC_TARGETS, "update of the critic", "compute_values")

    def __call__(
        self, micro: MicroBatch, value_RT: torch.Tensor
    ) -> tuple[torch.Tensor, MicroBatchStats]:
        """Return the 0-d loss of a micro-batch and its metrics, from `[R, T]` values."""

        def pad(name: str) -> torch.Tensor:
            return from_host(self.targets.padded(name, micro.rows), value_RT.device)

        # A context rank has values only for the tokens that it predicts.
        predicted_RT = micro.predicted_mask(value_RT.size(1))
        return_RT = pad("return")
        loss_RT, info = clipped_value_loss(
            value_RT, pad("value"), return_RT, predicted_RT, clip=self.clip_range
        )
        loss = aggregate(
            loss_RT,
            pad("mask"),
            self.aggregation,
            denominator=self.denominator,
            num_tokens_B=trajectory_lengths(self.targets, micro, value_RT.device),
        )
        num_tokens = predicted_RT.sum().float()
        return loss, {
            "loss": loss.detach(),
            "num_tokens": num_tokens,
            "value_loss": loss_RT.detach().sum(),
            "value_clipfrac": info["value_clipfrac"] * num_tokens,
            "value": value_RT.detach().sum(),
            "return": masked_sum(return_RT, predicted_RT),
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
        """Load this rank's slices of a checkpoint with the same body and reset the optimizer.

        If the checkpoint has no value head, the weight of the head is set to 0.
        """
        self.megatron_model.load_hf(folder, fresh=(HF_SCORE_HEAD,))

    def reset_optimizer(self) -> None:
        """Reset Adam's moments and the step count."""
        self.megatron_model.reset_optimizer()

    def compute_values(self, shard: ScoringShard) -> PackedScores | None:
        """Compute the value before every response token.

        One rank of the last pipeline stage of each data-parallel rank returns the values, all
        others None.
        """
        head = ScalarHead(num_positions=shard.rows.num_positions)
        return self.megatron_model.forward_only(shard.rows, shard.micros, head)

    def update(
        self, shard: UpdateShard, scored: ScoringShard | None = None, lr: float | None = None
    ) -> UpdateStats:
        """Take the optimizer steps of the shard on the clipped value loss.

        Args:
            shard: Rows, values and returns of this data rank.
            scored: The shard that `compute_values` was given for the same batch; None if it was
                not called.
            lr: Learning rate; replaces `optim.critic_lr`.
        """
        rows = shard.gather_rows(scored)
        head = ScalarHead(num_positions=rows.num_positions)
        aggregation = str(self._config.algo.loss_aggregation)
        lr = self._config.optim.critic_lr if lr is None else lr
        results = []
        for step in shard.steps:
            objective = ValueObjective(
                shard.targets, step.denominator, VALUE_CLIP_RANGE, aggregation
            )
            results.append(
                self.megatron_model.train_step(
                    rows, step.micros, shard.targets.mask_M, head, objective, VALUE_METRICS, lr=lr
                )
            )
        return summarize_steps(results, VALUE_METRICS)
