"""Megatron ranks as Ray actors, whatever model they hold: starting, naming, calling, ending them.

`RankActor` is the process of one rank, `RankGroup` all of them on the driver. The ranks of a
tensor-parallel group stay inside one node. What a rank can do is the subclass's business.

Every rank beats (`heartbeat`), and whoever waits for one looks whether all do: a rank that is
stopped or blocked is an error that names it, long before the deadline of the call.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from mega_agentrl.runtime.heartbeat import Heart, Listener
from mega_agentrl.runtime.placement import PolicyPlacement
from mega_agentrl.runtime.remote import (
    DiedError,
    ModelGoneError,
    RemoteError,
    free_port,
    gather,
    redirect_output,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Self

    from mega_agentrl.actor.network import Seat
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.runtime.heartbeat import Station


_LOOK_AROUND_S = 5.0
"""How long ranks get to turn out dead after one of them has failed."""


class RankActor:
    """One rank in a process of its own. heart: where it beats to, and its name there."""

    def __init__(
        self,
        config: TrainConfig,
        rank: int,
        world_size: int,
        log_file: str,
        heart: tuple[Station, str] | None = None,
    ) -> None:
        redirect_output(Path(log_file))
        # Set before the first import of torch in this process.
        self._num_threads = num_threads(config)
        os.environ["OMP_NUM_THREADS"] = str(self._num_threads)
        if config.deterministic:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        self._config = config
        self._rank = rank
        self._world_size = world_size
        if heart is not None:
            self._heart = Heart(*heart)

    def address(self) -> tuple[str, int]:
        """Host and a free port of this rank."""
        return ray.util.get_node_ip_address(), free_port()

    def visible_gpus(self) -> str:
        """The GPUs that this process may use, as CUDA names them; empty where none was given."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def _seat(self, master_address: str, master_port: int) -> Seat:
        """This rank's place among the others, which meet at that address."""
        from mega_agentrl.actor.network import Seat

        return Seat(
            rank=self._rank,
            world_size=self._world_size,
            master_address=master_address,
            master_port=master_port,
            timeout_s=self._config.cluster.call_deadline_s,
            num_threads=self._num_threads,
        )


def num_threads(config: TrainConfig) -> int:
    """CPU threads of a rank: all ranks share half of this machine's cores, engines the rest."""
    if config.deterministic:
        return 1
    num_cores = len(os.sched_getaffinity(0))
    return max(1, num_cores // (2 * config.parallel.num_ranks))


class RankGroup:
    """All ranks of one model. kind: what errors call it; log_name: what its log files begin with.
    hosts_engines: whether its GPUs are those that `cluster.colocated` lets the engines share.

    Waits for its ranks only up to `cluster.call_deadline_s`; raises `RemoteError` naming the
    operation and the rank that failed or is silent.
    """

    kind: ClassVar[str]
    log_name: ClassVar[str]
    actor_class: ClassVar[type[RankActor]]
    hosts_engines: ClassVar[bool] = False

    def __init__(self, actors: Sequence[Any], config: TrainConfig) -> None:
        self._actors = list(actors)
        self._config = config
        self._placement: PolicyPlacement | None = None
        self._listener: Listener | None = None
        self._spawn: Callable[[], None] | None = None

    @classmethod
    def launch(cls, config: TrainConfig, *, on_gpu: bool, log_folder: Path) -> Self:
        """Start the processes; `start` then builds the model in them."""
        group = cls([], config)
        group._spawn = partial(group._start_processes, config, on_gpu, log_folder)
        group._spawn()
        return group

    def restart(self) -> None:
        """End what is left of the ranks and start them all anew, as at the beginning."""
        assert self._spawn is not None, "a group that was not launched cannot be restarted"
        self._end_ranks()
        if not self._is_shared:
            # Shared places stay: whoever is in them would end with them.
            self._release()
        self._spawn()
        self.start()

    def _start_processes(self, config: TrainConfig, on_gpu: bool, log_folder: Path) -> None:
        layout = config.parallel
        self._config = config
        if self._placement is None:
            self._placement = PolicyPlacement(config, on_gpu=on_gpu, shared=self._is_shared)
        placement = self._placement
        self._listener = Listener(ray.util.get_node_ip_address())
        remote_class = ray.remote(num_cpus=1, num_gpus=1 if on_gpu else 0)(self.actor_class)
        self._actors = [
            remote_class.options(scheduling_strategy=placement.of(rank)).remote(
                config,
                rank,
                layout.num_ranks,
                str(log_folder / f"{self.log_name}-rank{rank}.log"),
                (self._listener.station, self.name(rank)),
            )
            for rank in range(layout.num_ranks)
        ]

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
        try:
            return gather(calls, operation, self._config.cluster.call_deadline_s, self.look)
        except RemoteError as error:
            raise self.explain(error) from error

    def look(self) -> None:
        """Raise `DiedError` where a rank has fallen silent."""
        if self._listener is not None:
            self._listener.check([self.name(rank) for rank in range(len(self._actors))])

    def explain(self, error: RemoteError) -> Exception:
        """The error with what the ranks were at; `ModelGoneError` where one is dead or silent."""
        if isinstance(error, DiedError) and error.name.startswith(self.kind):
            return ModelGoneError(str(error), error.name)
        if dead := self._dead():
            return ModelGoneError(f"{', '.join(dead)} died; {error}", dead[0])
        if self._listener is None or isinstance(error, DiedError):
            return error
        return RemoteError(f"{error}\nRanks, by their last words: {self._listener.described()}")

    def _dead(self) -> list[str]:
        calls = {actor.address.remote(): self.name(k) for k, actor in enumerate(self._actors)}
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_LOOK_AROUND_S)
        dead = []
        for call in ready:
            try:
                ray.get(call)
            except ray.exceptions.RayActorError:
                dead.append(calls[call])
        return sorted(dead)

    def name(self, rank: int) -> str:
        """What errors call a rank."""
        return f"{self.kind} rank {rank}"

    def close(self) -> None:
        """End every rank; safe to call twice."""
        self._end_ranks()
        self._release()

    @property
    def _is_shared(self) -> bool:
        return self.hosts_engines and self._config.cluster.colocated

    def _end_ranks(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _release(self) -> None:
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
