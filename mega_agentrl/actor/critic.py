"""One rank of the critic: a value head on a policy's body.

The value of response token t is read at the hidden state that predicts t, so it knows the
prompt and the response before t: V(s_t), what `algo.advantage.gae` takes. A head that the
checkpoint lacks starts at zero, the same on every rank, and so do all values.

Values in and out are plain or CPU tensors, so that a remote call can carry them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.actor import checkpoint
from mega_agentrl.actor.heads import ScalarHead
from mega_agentrl.actor.network import Network, Seat, summary
from mega_agentrl.algo.policy_loss import aggregate, count
from mega_agentrl.algo.value_loss import clipped_value_loss, explained_variance
from mega_agentrl.batch.minibatch import step_masks
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import SCORE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.actor.packing import MicroBatch
    from mega_agentrl.actor.schedule import Share
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch, UpdateStats

VALUE_CLIP = 0.5
"""How far an update may move a value before its gradient stops, in units of the reward."""

VALUE_METRICS = ("value_loss", "value_clipfrac", "value", "return")


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """Clipped value loss of one optimizer step.

    batch: all rows; `value_BT` and `return_BT` are needed. mask_BT: [B, T] the tokens of this
    step's rows. clip: how far a value may move from `value_BT`. mode: of `aggregate`, with
    the denominator counted over mask_BT, however the rows are cut.
    """

    batch: TrainBatch
    mask_BT: torch.Tensor
    clip: float
    mode: str

    def __post_init__(self) -> None:
        missing = [name for name in ("value_BT", "return_BT") if getattr(self.batch, name) is None]
        if missing:
            raise ValueError(
                f"update of the critic: the batch has no {', '.join(missing)}; expected them "
                "from values and from the advantages before the update"
            )

    def __call__(self, micro: MicroBatch, value_RT: torch.Tensor) -> tuple[torch.Tensor, Share]:
        rows, device = list(micro.rows), value_RT.device
        mask_RT = self.mask_BT[rows].to(device)
        # Of a row's tokens only those that this context rank holds have a value here.
        here_RT = micro.predicted(value_RT.size(1))
        return_RT = self.batch.return_BT[rows].to(device)
        loss_RT, info = clipped_value_loss(
            value_RT, self.batch.value_BT[rows].to(device), return_RT, here_RT, clip=self.clip
        )
        denominator = count(self.mask_BT, self.mode).item()
        loss = aggregate(loss_RT, mask_RT, self.mode, denominator=denominator)
        num_tokens = here_RT.sum().float()
        return loss, {
            "loss": loss.detach(),
            "num_tokens": num_tokens,
            "value_loss": loss_RT.detach().sum(),
            "value_clipfrac": info["value_clipfrac"] * num_tokens,
            "value": value_RT.detach().sum(),
            "return": return_RT[here_RT].sum(),
        }


class CriticRank:
    """One process's part of the critic; weights are undefined until `load`."""

    def __init__(self, config: TrainConfig, seat: Seat, *, model_path: str) -> None:
        """model_path: checkpoint of a policy, or of a sequence classifier with one label."""
        self._config = config
        shape = ModelShape.from_folder(model_path).with_scalar_head()
        self.network = Network(config, shape, seat)

    def load(self, folder: str) -> None:
        """Read this rank's slices of a checkpoint of the same body; moments start anew."""
        self.network.load(folder, fresh=(SCORE,))

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments."""
        self.network.reset_optimizer()

    def values(self, batch: TrainBatch) -> tuple[list[int], torch.Tensor] | None:
        """The value before every response token.

        Returns the rows of this rank's data share and their [rows, T] float32 values, 0 after
        a row's end; on one rank of the share's last stage, else None.
        """
        width = batch.response_BT.size(1)
        select_BT = torch.arange(width)[None, :] < batch.length_B[:, None]
        scored = self.network.score(batch, select_BT, ScalarHead(num_positions=width))
        if scored is None:
            return None
        rows, (value_BT,) = scored
        return rows, value_BT

    def update(self, batch: TrainBatch, lr: float | None = None) -> UpdateStats:
        """optim.num_minibatches steps of the clipped value loss over the batch, in row order.

        lr: in place of optim.critic_lr. The metric `explained_variance` is that of the values
        in the batch, from before the update.
        """
        head = ScalarHead(num_positions=batch.response_BT.size(1))
        mode = str(self._config.algo.aggregation)
        lr = self._config.optim.critic_lr if lr is None else lr
        results = []
        for mask_BT in step_masks(batch.mask_BT, self._config.optim.num_minibatches):
            objective = ValueObjective(batch, mask_BT, VALUE_CLIP, mode)
            results.append(self.network.step(batch, mask_BT, head, objective, VALUE_METRICS, lr=lr))
        stats = summary(results, VALUE_METRICS)
        explained = explained_variance(batch.value_BT, batch.return_BT, batch.mask_BT).item()
        return replace(stats, metrics={**stats.metrics, "explained_variance": explained})

    def save(
        self, folder: str, extra: Mapping[str, Any] | None = None, keep: int | None = None
    ) -> str:
        """Write a checkpoint of the training state; see `actor.checkpoint.save`."""
        timeout_s = self._config.cluster.call_deadline_s
        return str(
            checkpoint.save(self.network, folder, extra=extra, keep=keep, timeout_s=timeout_s)
        )

    def resume(self, folder: str) -> dict[str, Any]:
        """Take up a checkpoint, of any layout; returns what `save` was given as extra."""
        return checkpoint.load(self.network, folder)

    def close(self) -> None:
        """Leave the process groups; safe to call twice."""
        self.network.close()
