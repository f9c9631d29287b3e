"""A weight update as the driver makes it, between trainer processes and engines in hosts.

update = LiveTransfer(trainer, engines)
update.connect()
update(folder, version)              # or raises what the engines say, after `refuse`
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mega_agentrl.reshard.verify.digest_verifier import regions_of_layout
from tests.generator.engine_host import DEADLINE_S
from tests.reshard.fake_rollout import expected_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mega_agentrl.reshard.layout import ShardLayout
    from tests.generator.engine_host import EngineHost
    from tests.reshard.fake_trainer import FakeTrainer
    from tests.reshard.faults import Fault


class LiveTransfer:
    """Between one trainer and some engines."""

    def __init__(self, trainer: FakeTrainer, engines: Sequence[EngineHost]) -> None:
        self.trainer, self.engines = trainer, list(engines)
        self.layouts: list[list[list[ShardLayout]]] = []

    @classmethod
    @contextmanager
    def connected(
        cls, trainer: FakeTrainer, engine: EngineHost, folder: Path
    ) -> Iterator[LiveTransfer]:
        """Connect a trainer and an engine, which ends with the weights of the folder."""
        update = cls(trainer, [engine])
        update.connect()
        yield update
        update.connect()
        update(folder, 100)

    def connect(self, *, fault: Fault | None = None) -> None:
        """Let all ranks join a new session. fault: what a trainer rank is told wrongly."""
        found = self._on_all("layout")
        self.layouts = [[packed.unpack() for packed, _ in workers] for workers in found]
        rollout_layouts = [layout for workers in self.layouts for layout in workers]
        session = self.trainer.connect(rollout_layouts, fault=fault)
        first_ranks = itertools.accumulate(
            [len(workers) for workers in self.layouts], initial=session.plan.num_trainer_ranks
        )
        joining = [
            engine.begin("join_weight_transfer", session, first_rank)
            for engine, first_rank in zip(self.engines, first_ranks, strict=False)
        ]
        self.trainer.wait_joined()
        for join in joining:
            join.result(DEADLINE_S)

    def __call__(
        self, folder: Path, version: int, *, fault: Fault | None = None, hold: bool = False
    ) -> None:
        """Bring the weights of a folder into all engines and serve them.

        Raises `RuntimeError` with what every engine and trainer rank says.
        """
        self.prove(version, self.move(folder, version, fault=fault, hold=hold))
        self._on_all("resume")

    def move(
        self, folder: Path, version: int, *, fault: Fault | None = None, hold: bool = False
    ) -> list[Any]:
        """Until all have received; what the trainer ranks say of the regions.

        `hold`: hold running requests instead of waiting for them.
        """
        self._on_all("pause", hold)
        self.trainer.send(folder, version, fault=fault)
        receiving = [engine.begin("receive_weights", version) for engine in self.engines]
        errors = [call.exception(DEADLINE_S) for call in receiving]
        results = self.trainer.results()
        self._refuse_after([*errors, *results])
        return results

    def prove(self, version: int, rank_digests: list[Any]) -> None:
        """Until all have confirmed."""
        digest_of = self.trainer.expected_digests(rank_digests)
        confirming = [
            engine.begin(
                "verify_weights",
                version,
                [expected_of(regions_of_layout(layout), digest_of) for layout in workers],
            )
            for engine, workers in zip(self.engines, self.layouts, strict=True)
        ]
        self._refuse_after([call.exception(DEADLINE_S) for call in confirming])

    def _refuse_after(self, outcomes: Sequence[Any]) -> None:
        errors = [str(outcome) for outcome in outcomes if isinstance(outcome, Exception)]
        if errors:
            self._on_all("refuse_requests", f"one of all failed: {errors[0]}")
            raise RuntimeError("\n".join(errors))

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        calls = [engine.begin(method, *args) for engine in self.engines]
        return [call.result(DEADLINE_S) for call in calls]
