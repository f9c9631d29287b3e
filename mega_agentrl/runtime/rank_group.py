"""Megatron ranks as Ray actors, whatever model they hold: starting, naming, calling, ending them.

`RankActor` is the process of one rank, `RankGroup` all of them on the driver. The ranks of a
tensor-parallel group stay inside one node. What a rank can do is the subclass's business.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from mega_agentrl.runtime.placement import PolicyPlacement
from mega_agentrl.runtime.remote import free_port, gather, redirect_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Self

    from mega_agentrl.actor.network import Seat
    from mega_agentrl.config.schema import TrainConfig


class RankActor:
    """One rank in a process of its own."""

    def __init__(self, config: TrainConfig, rank: int, world_size: int, log_file: str) -> None:
        redirect_output(Path(log_file))
        # Set before the first import of torch in this process.
        os.environ["OMP_NUM_THREADS"] = str(config.parallel.threads)
        self._config = config
        self._rank = rank
        self._world_size = world_size

    def address(self) -> tuple[str, int]:
        """Host and a free port of this rank."""
        return ray.util.get_node_ip_address(), free_port()

    def _seat(self, master_address: str, master_port: int) -> Seat:
        """This rank's place among the others, which meet at that address."""
        from mega_agentrl.actor.network import Seat

        return Seat(
            rank=self._rank,
            world_size=self._world_size,
            master_address=master_address,
            master_port=master_port,
            timeout_s=self._config.cluster.call_deadline_s,
        )


class RankGroup:
    """All ranks of one model. kind: what errors call it; log_name: what its log files begin with.

    Waits for its ranks only up to `cluster.call_deadline_s`; raises `RemoteError` naming the
    operation and the rank that failed or is silent.
    """

    kind: ClassVar[str]
    log_name: ClassVar[str]
    actor_class: ClassVar[type[RankActor]]

    def __init__(
        self, actors: Sequence[Any], config: TrainConfig, placement: PolicyPlacement | None = None
    ) -> None:
        self._actors = list(actors)
        self._placement = placement
        self._config = config

    @classmethod
    def launch(cls, config: TrainConfig, *, on_gpu: bool, log_folder: Path) -> Self:
        """Start the processes; `start` then builds the model in them."""
        layout = config.parallel
        placement = PolicyPlacement(layout, on_gpu=on_gpu)
        remote_class = ray.remote(num_cpus=1, num_gpus=1 if on_gpu else 0)(cls.actor_class)
        actors = [
            remote_class.options(scheduling_strategy=placement.of(rank)).remote(
                config, rank, layout.num_ranks, str(log_folder / f"{cls.log_name}-rank{rank}.log")
            )
            for rank in range(layout.num_ranks)
        ]
        return cls(actors, config, placement)

    def start(self) -> None:
        """Let all ranks meet, and build the model."""
        name = self.name(0)
        address = {name: self._actors[0].address.remote()}
        host, port = self.gather(f"address of the {self.kind}", address)[name]
        self.gather(f"start of the {self.kind}", self.start_on_ranks("start", host, port))

    def start_on_ranks(self, method: str, *args: Any) -> dict[str, Any]:
        """Start a method of every rank's process; object refs by rank name."""
        return self.start_each(method, [args] * len(self._actors))

    def start_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
        """The same with arguments of its own for each rank."""
        return {
            self.name(rank): getattr(actor, method).remote(*args)
            for rank, (actor, args) in enumerate(zip(self._actors, arguments, strict=True))
        }

    def gather(self, operation: str, calls: Mapping[str, Any]) -> dict[str, Any]:
        """Results by rank name, within the deadline."""
        return gather(calls, operation, self._config.cluster.call_deadline_s)

    def name(self, rank: int) -> str:
        """What errors call a rank."""
        return f"{self.kind} rank {rank}"

    def close(self) -> None:
        """End every rank; safe to call twice."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        if self._placement is not None:
            self._placement.release()
            self._placement = None


def rows_of(
    answers: Sequence[tuple[list[int], *tuple[Any, ...]] | None], num_rows: int
) -> Iterator[tuple[list[int], *tuple[Any, ...]]]:
    """The answers of the ranks that hold results: rows and values; each row comes once."""
    parts = [part for part in answers if part is not None]
    seen = sorted(row for rows, *_ in parts for row in rows)
    assert seen == list(range(num_rows)), "ranks must answer for each row once"
    yield from parts
