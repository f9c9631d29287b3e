"""A reward model in a folder as one object: a Ray actor per rank behind the `RewardModel` port.

It is cut as the policy is (`parallel`) and has ranks, and on a GPU devices, of its own. Every rank
gets the whole batch and reads its own part of it. Token ids go to it as they are, so that its
tokenizer must be the policy's; `inputs.check_tokenizers` sees to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray
import torch

from mega_agentrl.runtime.rank_group import RankActor, RankGroup, rows_of
from mega_agentrl.types.doing import doing

if TYPE_CHECKING:
    from mega_agentrl.types.batch import TrainBatch


class RewardActor(RankActor):
    """One rank in a process of its own; forwards to `actor.reward_model.RewardRank`."""

    def start(self, master_address: str, master_port: int) -> None:
        """Join the process groups, build the model and load it."""
        from mega_agentrl.actor.reward_model import RewardRank

        source = self._config.reward.model.source
        seat = self._seat(master_address, master_port)
        with doing("start"):
            self._model = RewardRank(self._config, seat, model_path=source)
            self._model.load(source)

    def scores(self, batch: TrainBatch) -> tuple[list[int], torch.Tensor] | None:
        """See `RewardRank.scores`."""
        with doing("scores"):
            scored: tuple[list[int], torch.Tensor] | None = self._model.scores(batch)
        return scored


class RewardGroup(RankGroup):
    """All ranks; implements `types.ports.RewardModel`."""

    kind = "reward model"
    log_name = "reward"
    actor_class = RewardActor

    def scores(self, batch: TrainBatch) -> torch.Tensor:
        """See `RewardModel.scores`."""
        score_B = torch.zeros(batch.num_rows, dtype=torch.float32)
        calls = self.start_on_ranks("scores", ray.put(batch))
        answers = list(self.gather("reward model scores", calls).values())
        for rows, part_B in rows_of(answers, batch.num_rows):
            score_B[rows] = part_B
        return score_B
