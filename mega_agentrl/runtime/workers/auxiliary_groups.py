"""The critic and a local reward model, each a group of Ray actors with one Megatron rank.

Both have the policy's parallel layout (`parallel`), but ranks of their own, and on GPUs devices of
their own or, with `cluster.colocated_models`, those of the policy's ranks in turn. Every rank
receives the rows of its data rank (`batch_sender`). If a rank is dead or hangs, calls raise
`AuxiliaryModelLostError`, until `restart_if_lost` has started all ranks again.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.algo.value_loss import explained_variance
from mega_agentrl.batch.packed_rows import CRITIC_TARGETS, unpack_scores
from mega_agentrl.runtime.remote_calls import ModelRankDiedError, RemoteCallError
from mega_agentrl.runtime.workers.rank_group import RankActor, RankGroup
from mega_agentrl.types.activity import track_activity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch, UpdateStats


class AuxiliaryActor(RankActor):
    """Ray actor of one rank; subclasses build the model in `start`."""

    _model: Any

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the rank."""
        with track_activity(method):
            return getattr(self._model, method)(*args)


class AuxiliaryGroup(RankGroup):
    """All ranks of a critic or a reward model."""

    _is_lost = False
    """Whether a rank died or hangs, so that the remaining ranks are unusable."""
    _reserve_gpus: Callable[[], AbstractContextManager[object]] = nullcontext
    _turn: Callable[[str], AbstractContextManager[object]] = nullcontext

    def share_gpus(
        self,
        reserve: Callable[[], AbstractContextManager[object]],
        turn: Callable[[str], AbstractContextManager[object]],
    ) -> None:
        """Compute in turn with the policy, on whose GPUs the ranks were launched.

        Args:
            reserve: Keeps others off the GPUs while the ranks start (`Coordinator.reserve_gpus`).
            turn: Does so while they run a method (`Coordinator.model_turn`).
        """
        self._reserve_gpus, self._turn = reserve, turn

    def start(self) -> None:
        """Let all ranks join the process groups and build the model."""
        with self._reserve_gpus():
            super().start()

    def call_data_ranks(
        self, method: str, shards: Sequence[tuple[Any, ...]], *args: Any
    ) -> list[Any]:
        """Call a method as `RankGroup.call_data_ranks`, with the GPUs."""
        with self._turn(method):
            return super().call_data_ranks(method, shards, *args)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method as `RankGroup.call_all`, with the GPUs if it needs them."""
        with self._turn(method):
            return super().call_all(method, *args)

    def diagnose(self, error: RemoteCallError) -> Exception:
        """Return a `ModelRankDiedError` if a rank is dead or silent, else the error."""
        found = super().diagnose(error)
        self._is_lost |= isinstance(found, ModelRankDiedError)
        return found

    def restart(self) -> None:
        """Kill the remaining ranks and start all of them again from the initial state."""
        super().restart()
        self._is_lost = False

    def restart_if_lost(self) -> None:
        """Restart all ranks from the initial state if one of them was lost."""
        if self._is_lost:
            self.restart()


class CriticActor(AuxiliaryActor):
    """Ray actor of one critic rank; forwards calls to `actor.critic.CriticRank`."""

    def start(self, master_address: str, master_port: int) -> None:
        """Join the process groups, build the model and load its weights."""
        from mega_agentrl.actor.critic import CriticRank

        path = self._config.model.path
        rank_info = self._rank_info(master_address, master_port)
        with track_activity("start"):
            self._model = CriticRank(self._config, rank_info, model_path=path)
            self._model.load_hf(path)


class CriticGroup(AuxiliaryGroup):
    """All critic ranks (`types.protocols.Critic`).

    They start from `model.path` with a value head of zeros.
    """

    model_name = "critic"
    log_prefix = "critic"
    actor_class = CriticActor

    def __init__(self, actors: Sequence[Any], config: TrainConfig) -> None:
        super().__init__(actors, config)
        self._is_initial_state = True

    def compute_values(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with `value_BT`, [B, T] float32."""
        shards = self._sender.send_for_scoring(batch)
        answers = self.call_data_ranks("compute_values", shards)
        (value_BT,) = unpack_scores(answers, batch.length_B, batch.response_BT.size(1))
        return batch.with_fields(value_BT=value_BT)

    def update(self, batch: TrainBatch) -> UpdateStats:
        """Train on the batch and return the stats of rank 0.

        The metric `explained_variance` is computed from the values before the update.
        """
        self._is_initial_state = False
        aggregation = str(self._config.algo.loss_aggregation)
        shards = self._sender.send_for_update(batch, CRITIC_TARGETS, aggregation)
        stats: UpdateStats = self.call_data_ranks("update", shards)[0]
        assert batch.value_BT is not None and batch.return_BT is not None, "checked by the ranks"
        variance = explained_variance(batch.value_BT, batch.return_BT, batch.mask_BT).item()
        return replace(stats, metrics={**stats.metrics, "explained_variance": variance})

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint and return the extra values saved with it."""
        self._is_initial_state = False
        extra: dict[str, Any] = self.call_all("load_checkpoint", str(folder.resolve()))[0]
        return extra

    def reset(self) -> None:
        """Return to the initial state, by restarting the processes if they were changed."""
        if not self._is_initial_state:
            self.restart()

    def restart(self) -> None:
        """Kill the remaining ranks and start all of them again from the initial state."""
        super().restart()
        self._is_initial_state = True


class RewardModelActor(AuxiliaryActor):
    """Ray actor of one rank; forwards calls to `actor.reward_model.RewardModelRank`."""

    def start(self, master_address: str, master_port: int) -> None:
        """Join the process groups, build the model and load its weights."""
        from mega_agentrl.actor.reward_model import RewardModelRank

        source = self._config.reward.model.path_or_url
        rank_info = self._rank_info(master_address, master_port)
        with track_activity("start"):
            self._model = RewardModelRank(self._config, rank_info, model_path=source)
            self._model.load_hf(source)


class RewardModelGroup(AuxiliaryGroup):
    """All ranks of the reward model (`types.protocols.RewardModel`).

    The model reads the policy's token ids, so the tokenizers must agree; `inputs.check_tokenizers`
    checks that.
    """

    model_name = "reward model"
    log_prefix = "reward"
    actor_class = RewardModelActor

    def compute_scores(self, batch: TrainBatch) -> torch.Tensor:
        """Return the score of every row, [B] float32."""
        answers = self.call_data_ranks("compute_scores", self._sender.send_last_tokens(batch))
        (score_B1,) = unpack_scores(answers, torch.ones_like(batch.length_B), 1)
        return score_B1.squeeze(1)
