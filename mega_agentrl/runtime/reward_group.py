"""A reward model in a folder as one object: a Ray actor per rank behind the `RewardModel` port.

It is cut as the policy is (`parallel`) and has ranks, and on a GPU devices, of its own. Every rank
gets the whole batch and reads its own part of it. Token ids go to it as they are, so that its
tokenizer must be the policy's; `check_tokenizers` sees to that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from mega_agentrl.runtime.placement import PolicyPlacement
from mega_agentrl.runtime.remote import free_port, gather, redirect_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.data.codec import HFCodec
    from mega_agentrl.types.batch import TrainBatch

_PROBE = "<think> 12,345.6 \\boxed{x^2}\n</think> Größe 数学 </search> def f():\n    return 1"


def check_tokenizers(policy: HFCodec, judge: HFCodec, source: str) -> None:
    """Raise `ValueError` where the two do not give the same ids."""
    if policy.vocab_size != judge.vocab_size or policy.encode(_PROBE) != judge.encode(_PROBE):
        raise ValueError(
            f"reward.model.source={source}: its tokenizer has {judge.vocab_size} tokens and the "
            f"policy's {policy.vocab_size}, or they give different ids; expected the same, token "
            "ids go to it as they are; probable cause: a model of another family, which an "
            "OpenAI-compatible server can serve (give its address instead)"
        )


class RewardActor:
    """One rank in a process of its own; forwards to `actor.reward_model.RewardRank`."""

    def __init__(self, config: TrainConfig, rank: int, world_size: int, log_file: str) -> None:
        redirect_output(Path(log_file))
        # Set before the first import of torch in this process.
        os.environ["OMP_NUM_THREADS"] = str(config.parallel.threads)
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._model: Any = None

    def address(self) -> tuple[str, int]:
        """Host and a free port of this rank."""
        return ray.util.get_node_ip_address(), free_port()

    def start(self, master_address: str, master_port: int) -> None:
        """Join the process groups, build the model and load it."""
        from mega_agentrl.actor.network import Seat
        from mega_agentrl.actor.reward_model import RewardRank

        seat = Seat(
            rank=self._rank,
            world_size=self._world_size,
            master_address=master_address,
            master_port=master_port,
            timeout_s=self._config.cluster.actor_deadline_s,
        )
        source = self._config.reward.model.source
        self._model = RewardRank(self._config, seat, model_path=source)
        self._model.load(source)

    def scores(self, batch: TrainBatch) -> tuple[list[int], torch.Tensor] | None:
        """See `RewardRank.scores`."""
        scored: tuple[list[int], torch.Tensor] | None = self._model.scores(batch)
        return scored


class RewardGroup:
    """All ranks; implements `types.ports.RewardModel`."""

    def __init__(
        self, actors: Sequence[Any], config: TrainConfig, placement: PolicyPlacement | None = None
    ) -> None:
        self._actors = list(actors)
        self._placement = placement
        self._deadline_s = config.cluster.actor_deadline_s

    @classmethod
    def launch(cls, config: TrainConfig, *, on_gpu: bool, log_folder: Path) -> RewardGroup:
        """Start the processes; `start` then loads the model in them."""
        layout = config.parallel
        placement = PolicyPlacement(layout, on_gpu=on_gpu)
        actor_class = ray.remote(num_cpus=1, num_gpus=1 if on_gpu else 0)(RewardActor)
        actors = [
            actor_class.options(scheduling_strategy=placement.of(rank)).remote(
                config, rank, layout.num_ranks, str(log_folder / f"reward-rank{rank}.log")
            )
            for rank in range(layout.num_ranks)
        ]
        return cls(actors, config, placement)

    def start(self) -> None:
        """Join all ranks and load the weights."""
        name = self._name(0)
        calls = {name: self._actors[0].address.remote()}
        host, port = gather(calls, "address of the reward model", self._deadline_s)[name]
        self._call_all("start", host, port)

    def scores(self, batch: TrainBatch) -> torch.Tensor:
        """See `RewardModel.scores`."""
        score_B = torch.zeros(batch.num_rows, dtype=torch.float32)
        seen: list[int] = []
        for part in self._call_all("scores", ray.put(batch)):
            if part is not None:
                rows, part_B = part
                score_B[rows] = part_B
                seen.extend(rows)
        assert sorted(seen) == list(range(batch.num_rows)), "ranks must answer for each row once"
        return score_B

    def close(self) -> None:
        """See `RewardModel.close`."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        if self._placement is not None:
            self._placement.release()
            self._placement = None

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        calls = {
            self._name(rank): getattr(actor, method).remote(*args)
            for rank, actor in enumerate(self._actors)
        }
        return list(gather(calls, f"reward model {method}", self._deadline_s).values())

    @staticmethod
    def _name(rank: int) -> str:
        return f"reward model rank {rank}"
