"""The critic as a group of Ray actors, one per Megatron rank (`types.protocols.Critic`).

It starts from `model.path` with a value head of zeros and has the policy's parallel layout
(`parallel`), but ranks and, on GPUs, devices of its own. Every rank receives the whole batch and
works on its part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
import torch

from mega_agentrl.runtime.workers.rank_group import RankActor, RankGroup, iter_rank_rows
from mega_agentrl.types.activity import track_activity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch, UpdateStats


class CriticActor(RankActor):
    """Ray actor of one critic rank; forwards calls to `actor.critic.CriticRank`."""

    def start(self, master_address: str, master_port: int) -> None:
        """Join the process groups, build the model and load its weights."""
        from mega_agentrl.actor.critic import CriticRank

        path = self._config.model.path
        rank_info = self._rank_info(master_address, master_port)
        with track_activity("start"):
            self._critic = CriticRank(self._config, rank_info, model_path=path)
            self._critic.load_hf(path)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the rank."""
        with track_activity(method):
            return getattr(self._critic, method)(*args)


class CriticGroup(RankGroup):
    """All critic ranks."""

    model_name = "critic"
    log_prefix = "critic"
    actor_class = CriticActor

    def __init__(self, actors: Sequence[Any], config: TrainConfig) -> None:
        super().__init__(actors, config)
        self._is_initial_state = True

    def compute_values(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with `value_BT`, [B, T] float32."""
        value_BT = torch.zeros(batch.response_BT.shape, dtype=torch.float32)
        for rows, part_BT in iter_rank_rows(
            self._call_all("compute_values", ray.put(batch)), batch.num_rows
        ):
            value_BT[rows] = part_BT
        return batch.with_fields(value_BT=value_BT)

    def update(self, batch: TrainBatch) -> UpdateStats:
        """Train on the batch and return the stats of rank 0."""
        self._is_initial_state = False
        stats: UpdateStats = self._call_all("update", ray.put(batch))[0]
        return stats

    def save_checkpoint(
        self, folder: Path, extra: Mapping[str, Any] | None = None, keep: int | None = None
    ) -> None:
        """Save all ranks' state to a checkpoint folder."""
        self._call_all("save_checkpoint", str(folder.resolve()), dict(extra or {}), keep)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint and return the extra values saved with it."""
        self._is_initial_state = False
        extra: dict[str, Any] = self._call_all("load_checkpoint", str(folder.resolve()))[0]
        return extra

    def reset(self) -> None:
        """Return to the initial state, by restarting the processes if they were changed."""
        if not self._is_initial_state:
            self.restart()
            self._is_initial_state = True

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        calls = self.submit_to_ranks("call", method, *args)
        return list(self.gather(f"critic {method}", calls).values())
