"""Send the weights of the policy ranks to the rollout engines.

    connect           layouts and locations of both sides -> one plan, one link of all ranks
    sync              pause -> transfer -> verify -> probe -> resume
    sync_separately   the same for some engines over a temporary link, while the others keep
                      serving; the next `sync` opens a new link for all of them

With `model.lora` the first update over a link carries the weights below the adapters, and each
update the adapters, which the engines merge. Engines that sleep between updates lose their weights
and get merged ones instead.

Weights go from ranks to engines directly, not through the driver. An engine that has started an
update serves again only after its digests match the trainer's and its log-probs of a fixed prompt
agree with the policy's. After a failure the engines refuse requests. `coordinator` decides when to
sync, and what happens to lost engines.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from mega_agentrl.reshard.device_location import rank_locations
from mega_agentrl.reshard.link_planner import LinkPlanner
from mega_agentrl.reshard.mapping.lora_layout import lora_shapes, lora_shards
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.planner.traffic import count_traffic
from mega_agentrl.reshard.session import TransferContent, TransferSession
from mega_agentrl.reshard.transports.registry import bytes_by_transport
from mega_agentrl.reshard.verify.weight_probe import check_probe, probe_prompt
from mega_agentrl.runtime.remote_calls import RemoteCallError, gather, gather_with_causes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.reshard.device_location import DeviceLocation
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.reshard.link_planner import LinkPlan
    from mega_agentrl.reshard.planner.traffic import TransferTraffic
    from mega_agentrl.reshard.topology import RankLocation
    from mega_agentrl.reshard.verify.digest_verifier import DigestVerifier
    from mega_agentrl.runtime.workers.generator_group import GeneratorGroup
    from mega_agentrl.runtime.workers.policy_group import PolicyGroup

_ERROR_GRACE_S = 5.0
"""Time in seconds that other processes get to report their errors after a transfer has failed."""
PEER_WAITS_PER_CALL = 10
"""Number of waits for a peer that fit into the timeout of one transfer call."""

NUM_PROBE_TOKENS = 32
"""Length of the prompt that policy and engines both score after every update."""

Workers = list[tuple["Sequence[ShardLayout]", "DeviceLocation"]]
"""Layout and location of every policy rank, or of every worker of an engine."""


@dataclass(slots=True)
class _SyncLink:
    """An open link to some engines, with the tables that verify its transfers."""

    key: str
    """Key of the transfer sessions."""
    engine_indices: tuple[int, ...]
    """Engines that joined the link."""
    engine_actors: tuple[Any, ...]
    """Processes of these engines; a process that replaces one has to join a new link."""
    verifier: DigestVerifier
    """Computes the expected digests from the digests of the trainer ranks."""
    regions_by_engine: dict[int, list[np.ndarray]]
    """Indices of the digest regions by engine, one array per worker."""
    traffic: dict[TransferContent, TransferTraffic]
    """Bytes by rank and link type of the plan of each session."""
    has_weights: bool = False
    """Whether the engines have the weights below the adapters."""

    def next_contents(self) -> list[TransferContent]:
        """Return the sessions in which the next update is sent."""
        if self.has_weights and TransferContent.adapters in self.traffic:
            return [TransferContent.adapters]
        return list(self.traffic)


class WeightSynchronizer:
    """Sends the weights of one policy to its engines, in `dtype` "bfloat16" or "float32"."""

    def __init__(
        self,
        policy: PolicyGroup,
        engines: GeneratorGroup,
        config: TrainConfig,
        *,
        dtype: str,
    ) -> None:
        self._policy = policy
        self._engines = engines
        self._config = config
        self._dtype = dtype
        self._model_shape = ModelShape.from_folder(config.model.path)
        shapes, bucket_bytes = hf_shapes(self._model_shape), config.weight_sync.bucket_mib * 2**20
        self._link_planner = LinkPlanner(list(shapes), dtype, bucket_bytes)
        lora = config.model.lora
        self._lora = lora if lora.rank and not config.cluster.colocated else None
        """The adapters that engines merge."""
        self._adapter_planner = LinkPlanner(
            list(lora_shapes(shapes, lora.rank, lora.targets)), dtype, bucket_bytes
        )
        self._adapter_layouts: dict[int, list[ShardLayout]] = {}
        """By id of the layout of the weights, which the planner keeps."""
        self._timeout_s = config.cluster.call_timeout_s
        self._link_keys = (f"link-{number}" for number in itertools.count())
        self._store_address: tuple[str, int] | None = None
        self._workers_by_actor: dict[Any, Workers] = {}
        self._shared_link: _SyncLink | None = None

    def connect(self, engines: Sequence[int]) -> TransferTraffic:
        """Plan the transfer to these engines and open the link; return the traffic of all weights.

        Raises:
            ValueError: The shard layouts of the two sides do not fit together.
            RemoteCallError: A rank did not join; names the rank.
        """
        self.disconnect()
        self._shared_link = self._open_link(engines)
        return self._shared_link.traffic[TransferContent.weights]

    def sync(
        self,
        engines: Sequence[int],
        version: int,
        release_policy: Callable[[], None] | None,
    ) -> dict[str, float]:
        """Send the policy's current weights to these engines as this version.

        Args:
            engines: All engines that are to serve; a new link is opened if they or their processes
                have changed.
            version: Version of the weights.
            release_policy: Called once the engines' weights are verified and the policy has got its
                last call; None if there is nothing to release.

        Returns:
            `bytes_per_worker`, the most bytes that a worker received; `total_s`, the seconds from
            pause to resume; `transfer_s` and `verify_s`, the seconds of the transfer and of the
            comparison of digests; `probe_gap`, the largest median difference of the probe's
            log-probs of any engine, in nats.

        Raises:
            RemoteCallError: The transfer failed; names ranks, tensor and bucket. The engines then
                refuse requests, and the caller must `disconnect`.
            ValueError: The weights that arrived are wrong, with the same consequences.
        """
        actors = tuple(self._engines.actor(engine) for engine in engines)
        if self._shared_link is None or self._shared_link.engine_actors != actors:
            self.connect(engines)
        assert self._shared_link is not None, "made by connect()"
        return self._sync_over_link(self._shared_link, version, release_policy)

    def sync_separately(self, engines: Sequence[int], version: int) -> None:
        """Send the current weights to some engines without interrupting the others."""
        link = self._open_link(engines)
        try:
            self._sync_over_link(link, version, None)
        finally:
            self._close_link(link)
        self.disconnect()  # the shared link belongs to replaced processes

    def disconnect(self) -> None:
        """Close the link, if there is one; the next `sync` opens a new one."""
        link, self._shared_link = self._shared_link, None
        if link is not None:
            self._close_link(link)

    def reset_policy_ranks(self) -> None:
        """Forget the link and the store of the policy's previous ranks, after a restart."""
        self._store_address = self._shared_link = None

    def _open_link(self, engines: Sequence[int]) -> _SyncLink:
        """Plan the transfer to some engines and let all ranks involved join."""
        actors = tuple(self._engines.actor(engine) for engine in engines)
        policy_workers = self._query_policy()
        engine_workers = self._query_engines(engines)
        locations = rank_locations(
            [location for _, location in itertools.chain(policy_workers, *engine_workers.values())]
        )
        first_ranks = dict(
            zip(
                engines,
                itertools.accumulate(
                    (len(workers) for workers in engine_workers.values()),
                    initial=len(policy_workers),
                ),
                strict=False,
            )
        )
        policy_layouts = [layout for layout, _ in policy_workers]
        engine_layouts = [[layout for layout, _ in workers] for workers in engine_workers.values()]
        link_plan = self._link_planner.plan(policy_layouts, engine_layouts, locations)
        session = self._make_session(link_plan, locations)
        self._join_ranks(session, link_plan, first_ranks)
        traffic = {TransferContent.weights: _traffic(session)}
        if self._lora is not None:
            adapter_plan = self._adapter_planner.plan(
                [self._adapter_layout(layout) for layout in policy_layouts],
                [[self._adapter_layout(layout) for layout in engine] for engine in engine_layouts],
                locations,
            )
            session = replace(session, plan=adapter_plan.plan, content=TransferContent.adapters)
            self._join_ranks(session, adapter_plan, first_ranks)
            traffic[TransferContent.adapters] = _traffic(session)
        return _SyncLink(
            session.key,
            tuple(engines),
            actors,
            link_plan.verifier,
            {
                engine: [
                    link_plan.region_indices[first_ranks[engine] - len(policy_workers) + worker]
                    for worker in range(len(workers))
                ]
                for engine, workers in engine_workers.items()
            },
            traffic,
        )

    def _make_session(
        self, link_plan: LinkPlan, locations: Sequence[RankLocation]
    ) -> TransferSession:
        """Return the session of all weights of a new link."""
        if self._store_address is None:
            self._store_address = self._policy.open_store(self._timeout_s)
        host, port = self._store_address
        return TransferSession(
            address=host,
            port=port,
            key=next(self._link_keys),
            plan=link_plan.plan,
            timeout_s=self._timeout_s / PEER_WAITS_PER_CALL,
            locations=tuple(locations),
            transport=self._config.weight_sync.transport,
            lora=self._lora,
        )

    def _adapter_layout(self, layout: Sequence[ShardLayout]) -> list[ShardLayout]:
        """Return the factors of the adapters of a rank's weights, the same object for equal ones.

        Ranks name factors in their own way; the plan knows them by their Hugging Face names.
        """
        assert self._lora is not None, "asked for adapters alone"
        if id(layout) not in self._adapter_layouts:
            self._adapter_layouts[id(layout)] = lora_shards(
                layout, self._lora.rank, self._lora.targets
            )
        return self._adapter_layouts[id(layout)]

    def _join_ranks(
        self, session: TransferSession, link_plan: LinkPlan, first_ranks: Mapping[int, int]
    ) -> None:
        """Let all ranks join, each with its own part of the plan.

        Parts and regions are large, so one that several ranks need is serialized only once.

        Args:
            session: The session with the whole plan.
            link_plan: The parts.
            first_ranks: Rank of the first worker of each engine.
        """
        regions = _put_each(link_plan.trainer_regions)
        policy_args = [
            (replace(session, plan=plan), ref)
            for plan, ref in zip(link_plan.trainer_plans, regions, strict=True)
        ]
        sessions = _put_each(link_plan.engine_plans, lambda plan: replace(session, plan=plan))
        engine_args = {
            engine: (ref, first_rank)
            for (engine, first_rank), ref in zip(first_ranks.items(), sessions, strict=True)
        }
        calls = self._policy.submit_each("join_weight_transfer", policy_args)
        calls |= self._engines.submit_each("join_weight_transfer", engine_args)
        try:
            self._gather("joining the weight transfer", calls)
        except RemoteCallError:
            # Without waiting: ranks that wait for a dead peer leave when its time is up.
            self._policy.submit_to_ranks("leave_weight_transfer", session.key)
            raise

    def _query_policy(self) -> Workers:
        """Return layout and location of every policy rank."""
        answers = self._gather("packed_layout", self._policy.submit_to_ranks("packed_layout"))
        return [
            (self._link_planner.unpack(packed), location) for packed, location in answers.values()
        ]

    def _query_engines(self, engines: Sequence[int]) -> dict[int, Workers]:
        """Return layouts and locations of the engines' workers; asks each engine process once."""
        unknown = [i for i in engines if self._engines.actor(i) not in self._workers_by_actor]
        answers = self._gather("layout", self._engines.submit("layout", engines=unknown))
        for engine, workers in zip(unknown, answers.values(), strict=True):
            self._workers_by_actor[self._engines.actor(engine)] = [
                (self._link_planner.unpack(packed), location) for packed, location in workers
            ]
        return {engine: self._workers_by_actor[self._engines.actor(engine)] for engine in engines}

    def _sync_over_link(
        self, link: _SyncLink, version: int, release_policy: Callable[[], None] | None
    ) -> dict[str, float]:
        start_s, contents = time.perf_counter(), link.next_contents()
        try:
            self._call_engines(link, "pause", self._config.weight_sync.in_flight)
            paused_s = time.perf_counter()
            source_digests = self._transfer(link, version, contents)
            transferred_s = time.perf_counter()
            self._verify(link, version, source_digests)
            verified_s = time.perf_counter()
            gap = self._compare_probe_logprobs(link, release_policy)
            self._call_engines(link, "resume")
        except (RemoteCallError, ValueError) as error:
            self._block_engines(link, f"the update to version {version} failed: {error}")
            raise
        link.has_weights = True
        return {
            "bytes_per_worker": _max_bytes_per_worker([link.traffic[one] for one in contents]),
            "total_s": time.perf_counter() - start_s,
            "transfer_s": transferred_s - paused_s,
            "verify_s": verified_s - transferred_s,
            "probe_gap": gap,
        }

    def _transfer(
        self, link: _SyncLink, version: int, contents: Sequence[TransferContent]
    ) -> list[np.ndarray]:
        """Run the transfer and return the digests of every trainer rank."""
        engines = link.engine_indices
        calls = self._policy.submit_to_ranks("send_weights", link.key, version, contents)
        receive_calls = self._engines.submit("receive_weights", version, contents, engines=engines)
        # Engines first: they know the cause of a failure that ranks see as a lost connection.
        operation = f"transfer of weight version {version}"
        try:
            results = gather_with_causes(
                receive_calls | calls,
                operation,
                self._timeout_s,
                _ERROR_GRACE_S,
                self._policy.check_alive,
            )
        except RemoteCallError as error:
            raise self._policy.diagnose(error) from error
        return [results[name] for name in calls]

    def _verify(self, link: _SyncLink, version: int, source_digests: list[np.ndarray]) -> None:
        digests = link.verifier.expected_digests(source_digests)
        expected = {
            engine: (version, [digests[numbers] for numbers in workers])
            for engine, workers in link.regions_by_engine.items()
        }
        calls = self._engines.submit_each("verify_weights", expected)
        self._gather(f"verification of weight version {version}", calls)

    def _compare_probe_logprobs(
        self, link: _SyncLink, release_policy: Callable[[], None] | None
    ) -> float:
        """Return the largest median log-prob difference of any engine.

        Raises:
            ValueError: A difference is above the tolerance of `check_probe`.
        """
        prompt = probe_prompt(self._model_shape.vocab_size, NUM_PROBE_TOKENS)
        calls = self._policy.submit("compute_prompt_log_probs", prompt)
        if release_policy is not None:
            release_policy()  # the ranks answer the probe first
        answers = self._gather(
            "probe",
            calls
            | self._engines.submit("compute_prompt_log_probs", prompt, engines=link.engine_indices),
        )
        policy_logprobs = next(answers[name] for name in calls if answers[name] is not None)
        return max(
            check_probe(name, policy_logprobs, answers[name], self._dtype)
            for name in answers.keys() - calls.keys()
        )

    def _block_engines(self, link: _SyncLink, reason: str) -> None:
        """Make every engine that still answers refuse requests."""
        for call in self._engines.submit(
            "refuse_requests", reason, engines=link.engine_indices
        ).items():
            try:
                self._gather("refuse_requests", dict([call]))
            except RemoteCallError as error:
                print(f"weight update: {error}", file=sys.stderr)

    def _call_engines(self, link: _SyncLink, method: str, *args: Any) -> None:
        self._gather(method, self._engines.submit(method, *args, engines=link.engine_indices))

    def _close_link(self, link: _SyncLink) -> None:
        self._gather(
            "leaving the weight transfer",
            self._policy.submit_to_ranks("leave_weight_transfer", link.key),
        )

    def _gather(self, operation: str, calls: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return gather(calls, operation, self._timeout_s, self._policy.check_alive)
        except RemoteCallError as error:
            raise self._policy.diagnose(error) from error


def _traffic(session: TransferSession) -> TransferTraffic:
    return replace(
        count_traffic(session.plan, session.locations),
        transport_bytes=bytes_by_transport(session.plan, session.locations, session.transport),
    )


def _max_bytes_per_worker(traffic: Sequence[TransferTraffic]) -> float:
    """Return the most bytes that a rollout rank receives in some transfers."""
    received_bytes = [by_rank for one in traffic for by_rank in one.received_bytes.values()]
    rank_bytes = [sum(of_rank) for of_rank in zip(*received_bytes, strict=True)]
    return float(max(rank_bytes[traffic[0].num_trainer_ranks :]))


def _put_each(items: Sequence[Any], wrap: Callable[[Any], Any] = lambda item: item) -> list[Any]:
    """Put each distinct object into the object store once; return a ref for every item."""
    refs: dict[int, Any] = {}
    for item in items:
        if id(item) not in refs:
            refs[id(item)] = ray.put(wrap(item))
    return [refs[id(item)] for item in items]
