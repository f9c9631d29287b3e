"""The way of the weights from the policy ranks into the engines.

    connect     layouts and whereabouts of both sides -> one plan, one link that all ranks join
    send        pause -> move -> prove -> probe -> serve; the driver carries digests, no weights
    welcome     the same for single engines that are new or restarted, over a link of their own:
                the others go on serving and join the next common link with the next `send`

An engine that has started an update serves again only after its digests are those of the trainer
and its log-probs of a fixed prompt agree. After any failure the link is given up and the engines
refuse to serve; the next `send` makes a new link. Where an engine was lost in the middle of a
`send`, it waits for the keeper's successor and begins again.

On GPUs that policy and engines share (`turns`) the weights of both are there from before the link
moves them until they are proven; then the policy's leave, the KV caches wake, and the probe is
asked. Nobody can be welcomed alone there: all engines pause and get the same weights again.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mega_agentrl.batch.probe import probe_prompt
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import hf_shapes
from mega_agentrl.reshard.plan import plan_delivery
from mega_agentrl.reshard.proof import (
    Court,
    all_regions,
    regions_near,
    regions_of,
)
from mega_agentrl.reshard.traffic import count_traffic
from mega_agentrl.reshard.transport import WeightLink
from mega_agentrl.reshard.whereabouts import locations
from mega_agentrl.runtime.remote import RankGoneError, RemoteError, gather, gather_causes
from mega_agentrl.runtime.turns import Holder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.traffic import Traffic
    from mega_agentrl.reshard.whereabouts import Whereabouts
    from mega_agentrl.runtime.engine_keeper import EngineKeeper
    from mega_agentrl.runtime.generator_group import GeneratorGroup
    from mega_agentrl.runtime.policy_group import PolicyGroup
    from mega_agentrl.runtime.turns import Turns
    from mega_agentrl.types.ports import Generator

_GRACE_S = 5.0
"""How long others may take to say what they know of a transfer that has failed."""
WAITS_TO_A_CALL = 10
"""Waits for another rank that a call of a transfer may hold before its own deadline ends it."""

PROBE_TOKENS = 32
"""Length of the prompt that policy and engines both score after every update."""

_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}

Workers = list[tuple["list[ShardLayout]", "Whereabouts"]]


@dataclass(frozen=True, slots=True)
class _Line:
    """A link and what is proven over it. engines: numbers; regions: of the court, by engine and
    worker.
    """

    key: str
    engines: tuple[int, ...]
    court: Court
    regions: dict[int, list[np.ndarray]]
    traffic: Traffic


class WeightBridge:
    """Between one policy and its engines."""

    def __init__(
        self,
        policy: PolicyGroup,
        engines: GeneratorGroup,
        config: TrainConfig,
        *,
        dtype: str,
        turns: Turns | None = None,
    ) -> None:
        """turns: on the GPUs that both sides share; None: each has its own."""
        self._turns = turns
        self._policy = policy
        self._engines = engines
        self._config = config
        self._dtype = dtype
        self._shape = ModelShape.from_folder(config.model.path)
        self._deadline_s = config.cluster.call_deadline_s
        self._keys = (f"link-{number}" for number in itertools.count())
        self._address: tuple[str, int] | None = None
        self._workers: dict[Any, Workers] = {}
        self._keeper: EngineKeeper | None = None
        self._common: _Line | None = None
        self._version = 0

    def keep(self, keeper: EngineKeeper) -> None:
        """Whose new engines get the weights with the others, and who replaces lost ones."""
        self._keeper = keeper

    def connect(self) -> Traffic:
        """Plan the transfer to all engines and let every rank join; returns the plan's traffic.

        Raises `ValueError` for layouts that do not fit and `RemoteError` naming ranks that do
        not come. Called by `send` where there is no link.
        """
        self._disconnect()
        self._common = self._open(self._all_engines())
        return self._common.traffic

    def send(self, generator: Generator, version: int) -> Mapping[str, float]:
        """Bring the policy's current weights into every engine.

        Returns `bytes_per_worker` that the largest share of a worker has, `seconds` from pause to
        serving, `seconds_move` of the transfer, `seconds_prove` of comparing and packing and
        `probe_gap`, the mean difference of log-probs in nats. Raises `RemoteError` naming
        ranks, tensor and bucket; the engines then refuse to serve.
        """
        if generator is not self._engines:
            raise ValueError("send_weights: expected the generator this policy is attached to")
        with self._policy.turn:
            if self._turns is not None and self._keeper is not None and self._keeper.is_replacing:
                self._mend()  # who is lost is replaced only while the policy is off the GPUs
            while True:
                try:
                    report = self._send_to_all(version)
                except RankGoneError:
                    raise
                except RemoteError:
                    # Some engine is new by then, or the error is not an engine's death.
                    if not self._mend():
                        raise
                else:
                    break
            self._policy.is_ahead = False
            self._version = version
            self._engines.set_version(version)
            for engine in self._common.engines if self._common is not None else ():
                self._engines.admit(engine)
        if self._keeper is not None:
            self._keeper.wake()
        return report

    def send_again(self) -> None:
        """Bring the weights that were served last into every engine, after a sleep."""
        self.send(self._engines, self._version)

    def _mend(self) -> bool:
        """See `EngineKeeper.mend`; False where nobody does."""
        if self._keeper is None:
            return False
        if self._turns is not None:
            self._turns.make_room()
            self._disconnect()  # whoever is replaced meanwhile is not in the link
        return self._keeper.mend()

    def _send_to_all(self, version: int) -> dict[str, float]:
        if not self._all_engines():
            raise RemoteError("weight transfer: no engine is there to take it; all are lost")
        try:
            if self._turns is not None:
                self._turns.to_transfer(self._all_engines())
            if self._common is None or list(self._common.engines) != self._all_engines():
                self.connect()
            assert self._common is not None, "connect() has made it"
            return self._update(self._common, version)
        except (RemoteError, ValueError):
            self._disconnect()
            raise

    def _all_engines(self) -> list[int]:
        fresh = set() if self._keeper is None else self._keeper.fresh
        return sorted(fresh.union(self._engines.admitted))

    def welcome(self, engines: Sequence[int]) -> bool:
        """Bring the current weights into engines that are new, without touching the others.

        False where they have to wait: the policy is busy, or ahead of what is served, and then
        the next `send` does it.
        """
        if not self._policy.turn.acquire(blocking=False):
            return False  # whoever has it may be waiting for these engines
        try:
            if self._policy.is_ahead:
                return False
            if self._turns is not None:
                return self._send_to_those_asleep(self._turns)
            line = self._open(engines)
            try:
                self._update(line, self._version)
            finally:
                self._close(line)
            self._disconnect()  # its plan knows other workers
        finally:
            self._policy.turn.release()
        return True

    def _send_to_those_asleep(self, turns: Turns) -> bool:
        """The weights that are served once more, to all; False where it is not the time."""
        if turns.holder is not Holder.engines:
            return False
        self._disconnect()  # its plan knows other workers
        try:
            self._send_to_all(self._version)
        except (RemoteError, ValueError):
            turns.make_room()  # for the successor of whoever failed
            raise
        for engine in self._all_engines():
            self._engines.admit(engine)
        return True

    def forget_policy(self) -> None:
        """The policy's ranks are new ones: what was agreed with the old is gone with them."""
        self._address = self._common = None

    def _open(self, engines: Sequence[int]) -> _Line:
        """A plan for some engines, and a link that its ranks have joined."""
        layouts = self._policy.call_all("layout")
        workers = [self._workers_of(engine) for engine in engines]
        sinks = [layout for group in workers for layout, _ in group]
        at = self._gather("whereabouts", self._policy.start_on_ranks("whereabouts"))
        places = locations([*at.values(), *(where for group in workers for _, where in group)])
        plan = plan_delivery(
            layouts,
            sinks,
            places,
            self._dtype,
            names=list(hf_shapes(self._shape)),
            bucket_bytes=self._config.weights.bucket_mib * 2**20,
        )
        regions = all_regions(sinks)
        court = Court(layouts, regions)
        if self._address is None:
            self._address = self._policy.open_store(self._deadline_s)
        host, port = self._address
        link = WeightLink(
            address=host,
            port=port,
            key=next(self._keys),
            plan=plan,
            timeout_s=self._deadline_s / WAITS_TO_A_CALL,
            locations=tuple(places),
        )
        # Each side gets its own part of the plan and of the regions: whole, they are large.
        joining = [
            (replace(link, plan=plan.part_of([rank], [layout])), regions_near(layout, regions))
            for rank, layout in enumerate(layouts)
        ]
        first, links = 0, {}
        for engine, group in zip(engines, workers, strict=True):
            ranks = range(plan.num_sources + first, plan.num_sources + first + len(group))
            part = plan.part_of(ranks, [layout for layout, _ in group])
            links[engine] = (replace(link, plan=part, first_sink=first),)
            first += len(group)
        self._gather(
            "meeting for the weight transfer",
            self._policy.start_each("join", joining)
            | self._engines.start_each("connect_weights", links),
        )
        proven = {
            engine: [court.numbers_of(regions_of(layout)) for layout, _ in group]
            for engine, group in zip(engines, workers, strict=True)
        }
        return _Line(link.key, tuple(engines), court, proven, count_traffic(plan, places))

    def _workers_of(self, engine: int) -> Workers:
        """Layouts of an engine's workers; traced once in the life of an engine."""
        actor = self._engines.actor(engine)
        if actor not in self._workers:
            found = self._gather("layout", self._engines.start_call("layout", only=[engine]))
            (self._workers[actor],) = found.values()
        return self._workers[actor]

    def _update(self, line: _Line, version: int) -> dict[str, float]:
        start_s = time.perf_counter()
        try:
            self._on_engines(line, "pause")
            paused_s = time.perf_counter()
            testimonies = self._move(line, version)
            moved_s = time.perf_counter()
            self._prove(line, version, testimonies)
            proven_s = time.perf_counter()
            gap = self._probe(line)
            self._on_engines(line, "resume")
        except (RemoteError, ValueError) as error:
            self._refuse(line, f"the update to version {version} failed: {error}")
            raise
        workers = line.traffic.num_sources
        received = [sum(ranks) for ranks in zip(*line.traffic.received.values(), strict=True)]
        return {
            "bytes_per_worker": float(max(received[workers:])),
            "seconds": time.perf_counter() - start_s,
            "seconds_move": moved_s - paused_s,
            "seconds_prove": proven_s - moved_s,
            "probe_gap": gap,
        }

    def _move(self, line: _Line, version: int) -> list[np.ndarray]:
        """Run the transfer; what every trainer rank says of the regions."""
        calls = self._policy.start_on_ranks("send", line.key, version)
        receiving = self._engines.start_call("receive_weights", version, only=line.engines)
        # Engines first: they know what was wrong where trainer ranks only see them leave.
        operation = f"transfer of weight version {version}"
        try:
            results = gather_causes(
                receiving | calls, operation, self._deadline_s, _GRACE_S, self._policy.look
            )
        except RemoteError as error:
            raise self._policy.explain(error) from error
        return [results[name] for name in calls]

    def _prove(self, line: _Line, version: int, testimonies: list[np.ndarray]) -> None:
        digests = line.court.expected(testimonies)
        expected = {
            engine: (version, [digests[numbers] for numbers in workers])
            for engine, workers in line.regions.items()
        }
        calls = self._engines.start_each("confirm_weights", expected)
        self._gather(f"proof of weight version {version}", calls)

    def _probe(self, line: _Line) -> float:
        """The largest mean difference of any engine; raises `ValueError` where it is too large."""
        prompt = probe_prompt(self._shape.vocab, PROBE_TOKENS)
        calls = self._policy.start_call("probe", prompt)
        if self._turns is not None:
            self._turns.to_engines(line.engines)  # behind the ranks' own answers
        answers = self._gather(
            "probe", calls | self._engines.start_call("probe", prompt, only=line.engines)
        )
        ours = next(answers[name] for name in calls if answers[name] is not None)
        limit = _TOLERANCE[self._dtype]
        worst = 0.0
        for name in answers.keys() - calls.keys():
            gap = sum(abs(a - b) for a, b in zip(ours, answers[name], strict=True)) / len(ours)
            if not gap <= limit:
                raise ValueError(
                    f"probe: {name} gives a fixed prompt other log-probs than the policy, by "
                    f"{gap:.3g} nats in the mean, expected at most {limit:g}; probable "
                    "cause: the same bytes, but names or heads mapped differently on both sides"
                )
            worst = max(worst, gap)
        return worst

    def _refuse(self, line: _Line, reason: str) -> None:
        """Tell every engine that still answers; the reason is raised by the caller."""
        for call in self._engines.start_call("refuse", reason, only=line.engines).items():
            try:
                self._gather("refuse", dict([call]))
            except RemoteError as error:
                print(f"weight update: {error}", file=sys.stderr)

    def _on_engines(self, line: _Line, method: str, *args: Any) -> None:
        self._gather(method, self._engines.start_call(method, *args, only=line.engines))

    def _disconnect(self) -> None:
        if self._common is not None:
            self._close(self._common)
            self._common = None

    def _close(self, line: _Line) -> None:
        self._gather("leaving the weight transfer", self._policy.start_on_ranks("leave", line.key))

    def _gather(self, operation: str, calls: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return gather(calls, operation, self._deadline_s, self._policy.look)
        except RemoteError as error:
            raise self._policy.explain(error) from error
