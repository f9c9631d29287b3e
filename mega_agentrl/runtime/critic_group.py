"""The critic as one object: a Ray actor per Megatron rank behind the `Critic` port.

It starts from `model.path` under a head of zeros, is cut as the policy is (`parallel`) and has
ranks, and on a GPU devices, of its own. Every rank gets the whole batch and works on its part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
import torch

from mega_agentrl.runtime.rank_group import RankActor, RankGroup, rows_of
from mega_agentrl.types.doing import doing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch, UpdateStats


class CriticActor(RankActor):
    """One rank in a process of its own; forwards to `actor.critic.CriticRank`."""

    def start(self, master_address: str, master_port: int) -> None:
        """Join the process groups, build the model and load it."""
        from mega_agentrl.actor.critic import CriticRank

        path = self._config.model.path
        seat = self._seat(master_address, master_port)
        with doing("start"):
            self._critic = CriticRank(self._config, seat, model_path=path)
            self._critic.load(path)

    def call(self, method: str, *args: Any) -> Any:
        """Run a method of the rank."""
        with doing(method):
            return getattr(self._critic, method)(*args)


class CriticGroup(RankGroup):
    """All ranks; implements `types.ports.Critic`."""

    kind = "critic"
    log_name = "critic"
    actor_class = CriticActor

    def __init__(self, actors: Sequence[Any], config: TrainConfig) -> None:
        super().__init__(actors, config)
        self._is_as_started = True

    def add_values(self, batch: TrainBatch) -> TrainBatch:
        """See `Critic.add_values`."""
        value_BT = torch.zeros(batch.response_BT.shape, dtype=torch.float32)
        for rows, part_BT in rows_of(self._call_all("values", ray.put(batch)), batch.num_rows):
            value_BT[rows] = part_BT
        return batch.with_fields(value_BT=value_BT)

    def update(self, batch: TrainBatch) -> UpdateStats:
        """See `Critic.update`."""
        self._is_as_started = False
        stats: UpdateStats = self._call_all("update", ray.put(batch))[0]
        return stats

    def save(
        self, folder: Path, extra: Mapping[str, Any] | None = None, keep: int | None = None
    ) -> None:
        """See `Critic.save`."""
        self._call_all("save", str(folder.resolve()), dict(extra or {}), keep)

    def resume(self, folder: Path) -> dict[str, Any]:
        """See `Critic.resume`."""
        self._is_as_started = False
        extra: dict[str, Any] = self._call_all("resume", str(folder.resolve()))[0]
        return extra

    def reset(self) -> None:
        """See `Critic.reset`; with new processes, so that nothing can be left of the old state."""
        if not self._is_as_started:
            self.restart()
            self._is_as_started = True

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        calls = self.start_on_ranks("call", method, *args)
        return list(self.gather(f"critic {method}", calls).values())
