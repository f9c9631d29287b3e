"""A local reward model as a group of Ray actors (`types.protocols.RewardModel`).

It has the policy's parallel layout (`parallel`), but ranks and, on GPUs, devices of its own. Every
rank receives the whole batch and scores its part. The model reads the policy's token ids, so the
tokenizers must agree; `inputs.check_tokenizers` checks that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray
import torch

from mega_agentrl.runtime.workers.rank_group import RankActor, RankGroup, iter_rank_rows
from mega_agentrl.types.activity import track_activity

if TYPE_CHECKING:
    from mega_agentrl.types.batch import TrainBatch


class RewardModelActor(RankActor):
    """Ray actor of one rank; forwards calls to `actor.reward_model.RewardModelRank`."""

    def start(self, master_address: str, master_port: int) -> None:
        """Join the process groups, build the model and load its weights."""
        from mega_agentrl.actor.reward_model import RewardModelRank

        source = self._config.reward.model.path_or_url
        rank_info = self._rank_info(master_address, master_port)
        with track_activity("start"):
            self._model = RewardModelRank(self._config, rank_info, model_path=source)
            self._model.load_hf(source)

    def compute_scores(self, batch: TrainBatch) -> tuple[list[int], torch.Tensor] | None:
        """Return row numbers and scores of this rank's rows; None if another rank reports them."""
        with track_activity("score pass"):
            scored: tuple[list[int], torch.Tensor] | None = self._model.compute_scores(batch)
        return scored


class RewardModelGroup(RankGroup):
    """All ranks of the reward model."""

    model_name = "reward model"
    log_prefix = "reward"
    actor_class = RewardModelActor

    def compute_scores(self, batch: TrainBatch) -> torch.Tensor:
        """Return the score of every row, [B] float32."""
        score_B = torch.zeros(batch.num_rows, dtype=torch.float32)
        calls = self.submit_to_ranks("compute_scores", ray.put(batch))
        answers = list(self.gather("reward model compute_scores", calls).values())
        for rows, part_B in iter_rank_rows(answers, batch.num_rows):
            score_B[rows] = part_B
        return score_B
