"""Weight synchronization over real process groups: two tensor-parallel ranks, fake engines."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray
import torch

from mega_agentrl.config.enums import TransportKind
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig, EngineConfig, WeightSyncConfig
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.runtime.coordinator import Coordinator
from mega_agentrl.runtime.remote_calls import (
    NoEngineLeftError,
    PolicyRankDiedError,
    ProcessDiedError,
    RemoteCallError,
)
from mega_agentrl.runtime.weight_sync import WeightSynchronizer
from mega_agentrl.runtime.workers import engine_supervisor
from mega_agentrl.runtime.workers.generator_group import GeneratorGroup
from mega_agentrl.runtime.workers.gpu_time_sharing import (
    ALL_STATE,
    GpuOwner,
    GpuTimeSharing,
    ModelTurns,
)
from mega_agentrl.runtime.workers.policy_group import PolicyGroup
from tests.config.refusals import refused_setting
from tests.reshard.faults import cut
from tests.reshard.rollout_cuts import rollout_layout
from tests.runtime.fake_ranks import wait_until_dead
from tests.runtime.weight_sync_processes import (
    LORA,
    NUM_RANKS,
    FakeEngine,
    FakeRank,
    hf_tensors,
    lora_tensors,
    merged_tensors,
)

pytestmark = pytest.mark.extended


class Processes:
    """Rank and engine processes that the tests share; one that a test kills is started again."""

    def __init__(self, config, folder):
        self.config, self.folder = config, folder
        self.ranks, self.rollout_ranks, self.spares = [None] * NUM_RANKS, [], []
        self.kill_actor = ray.kill

    def start_all(self):
        """Return both ranks and two engines in their initial state."""
        for rank, actor in enumerate(self.ranks):
            log_file = str(self.folder / f"{rank}.log")
            self.ranks[rank] = actor or REMOTE_RANK.remote(self.config, rank, NUM_RANKS, log_file)
        self.spares, self.rollout_ranks = self.spares + self.rollout_ranks, []
        ray.get([actor.start.remote("", 0) for actor in self.ranks], timeout=300)
        ray.get([actor.reset.remote() for actor in self.spares], timeout=300)
        return self.ranks, [self.spawn(index) for index in range(2)]

    def spawn(self, index):
        self.rollout_ranks.append(
            self.spares.pop() if self.spares else FakeEngine.remote(self.folder)
        )
        return self.rollout_ranks[-1]

    def kill(self, actor):
        self.ranks = [None if actor is one else one for one in self.ranks]
        self.rollout_ranks = [one for one in self.rollout_ranks if one is not actor]
        self.kill_actor(actor)

    def set_aside(self, actor, no_restart=True):
        """Take the place of `ray.kill` for an engine that is replaced: the next test uses it."""


REMOTE_RANK = ray.remote(num_cpus=0)(FakeRank)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("weight_sync")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 50,
        "max_position_embeddings": 64,
    }
    config_json = {
        "architectures": ["Qwen3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    }
    (path / "config.json").write_text(json.dumps(sizes | config_json))
    return path


@pytest.fixture(scope="module")
def processes(ray_local, folder):
    config = TrainConfig(
        model=ModelConfig(path=str(folder)),
        # A fake engine answers a health check after its other calls: a slow machine is no dead
        # engine.
        engine=EngineConfig(tensor_parallel_size=1, stuck_timeout_s=600.0),
        # A tenth is the limit of a wait for a peer.
        cluster=ClusterConfig(num_engines=2, call_timeout_s=3000),
    )
    made = Processes(config, folder)
    _, engines = made.start_all()
    made.spares.append(FakeEngine.remote(folder))
    ray.get([engine.check_health.remote() for engine in (*engines, *made.spares)], timeout=300)
    Sides(made).sync(1)  # loads what the processes import late
    yield made
    for actor in [*made.ranks, *made.rollout_ranks, *made.spares]:
        if actor is not None:
            ray.kill(actor)


class Sides:
    """Policy and engines of the test's processes, and what coordinates them."""

    def __init__(self, processes):
        ranks, engines = processes.start_all()
        self.processes, config = processes, processes.config
        self.policy = PolicyGroup(ranks, config)
        self.engines = GeneratorGroup(engines, config, processes.spawn)
        self.weight_sync = WeightSynchronizer(self.policy, self.engines, config, dtype="float32")
        self.models, self.gpus = ModelTurns(self.policy), None
        self.coordinator = Coordinator(
            self.policy, self.engines, self.weight_sync, self.models, None
        )

    def share_gpus(self):
        """Let both sides use the same GPUs, which the policy holds at first."""
        self.gpus = GpuTimeSharing(self.models, self.engines)
        self.coordinator = Coordinator(
            self.policy, self.engines, self.weight_sync, self.models, self.gpus
        )

    def load_policy(self):
        """Let the policy have the shared GPUs."""
        self.gpus.acquire_for_models()
        self.models.set_gpu_resident(ALL_STATE)

    def sync(self, version):
        """Send the weights of this version; return the report."""
        with self.coordinator._lock:  # as an update: no replaced engine gets half of it
            self.policy.call_all("set_version", version)
            return self.coordinator.sync_weights(self.engines, version)

    def call_engine(self, index, method, *args):
        calls = self.engines.submit(method, *args, engines=[index])
        (answer,) = ray.get(list(calls.values()), timeout=300)
        return answer

    def history(self, index=0):
        return self.call_engine(index, "history")

    def lose_engine(self, index):
        self.engines.report_lost(index, self.engines.actor(index), "lost")

    def check_received(self, version, make_tensors=hf_tensors):
        folder = self.processes.folder
        shards = rollout_layout(ModelShape.from_folder(folder), 0, 1)
        expected = cut(shards, make_tensors(folder, version))
        for index in (0, 1):
            received = self.call_engine(index, "received")
            assert received.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(received[name], tensor), name


@pytest.fixture
def sides(processes, monkeypatch):
    monkeypatch.setattr(ray, "kill", processes.set_aside)
    monkeypatch.setattr(engine_supervisor, "_CHECK_INTERVAL_S", 0.05)
    made = Sides(processes)
    yield made
    made.coordinator._supervisor.close()


def test_every_engine_receives_its_shard_of_each_version(sides, folder):
    num_bytes = sum(4 * tensor.numel() for tensor in hf_tensors(folder, 1).values())
    for version in (1, 2):
        report = sides.sync(version)
        assert sides.engines.version == version
        assert report["bytes_per_worker"] == num_bytes
        assert report["probe_gap"] == 0
        assert report["total_s"] > 0
        sides.check_received(version)
    each_time = "pause receive_weights verify_weights compute_prompt_log_probs resume".split()
    assert sides.history() == ["layout", "join_weight_transfer", *each_time * 2]


def test_adapters_alone_are_sent_after_the_first_update(sides, processes, folder):
    config = replace(processes.config, model=replace(processes.config.model, lora=LORA))
    sides.weight_sync.__init__(sides.policy, sides.engines, config, dtype="float32")
    sides.policy.call_all("use_adapters")
    num_weight_bytes, num_adapter_bytes = (
        sum(4 * tensor.numel() for tensor in make_tensors(folder, 0).values())
        for make_tensors in (hf_tensors, lora_tensors)
    )
    for version, num_bytes in (
        (1, num_weight_bytes + num_adapter_bytes),
        (2, num_adapter_bytes),
        (3, num_adapter_bytes),
    ):
        report = sides.sync(version)
        assert report["bytes_per_worker"] == num_bytes
        sides.check_received(version, merged_tensors)
    # A process that replaces an engine has none of the weights yet.
    sides.lose_engine(1)
    sides.engines.wait_started(sides.engines.respawn_engine(1))
    sides.engines.registry.mark_started(1)
    report = sides.sync(4)
    assert report["bytes_per_worker"] == num_weight_bytes + num_adapter_bytes
    sides.check_received(4, merged_tensors)


def test_running_requests_are_held_if_weights_are_sent_in_flight(sides):
    sides.weight_sync._config = replace(
        sides.weight_sync._config, weight_sync=WeightSyncConfig(in_flight=True)
    )
    sides.sync(1)
    assert sides.history()[2:4] == ["pause", "hold"]
    sides.check_received(1)


def test_a_transport_that_cannot_connect_the_ranks_is_refused(sides, processes):
    config = replace(processes.config, weight_sync=WeightSyncConfig(transport=TransportKind.nccl))
    weight_sync = WeightSynchronizer(sides.policy, sides.engines, config, dtype="float32")
    setting = refused_setting(weight_sync.connect, [0, 1])
    assert setting == ("weight_sync.transport", "nccl")


def test_corrupted_engine_fails_verification_and_recovers(sides):
    sides.sync(1)
    sides.call_engine(1, "corrupt", "model.layers.1.mlp.down_proj.weight")
    with pytest.raises(RemoteCallError) as caught:
        sides.coordinator.sync_weights(sides.engines, 2)
    assert caught.value.operation == "verification of weight version 2"
    assert caught.value.processes == ("engine 1",)
    assert sides.engines.version == 1
    for index in (0, 1):
        assert "the update to version 2 failed" in sides.history(index)[-1]
    sides.call_engine(1, "corrupt", None)
    sides.sync(3)
    sides.check_received(3)


def test_diverged_replicas_are_named(sides):
    sides.policy.call_all("set_version", 1, True)
    with pytest.raises(ValueError):
        sides.coordinator.sync_weights(sides.engines, 1)
    assert "model.norm.weight" in sides.history()[-1], "the engines refuse with the reason"


def test_probe_detects_errors_that_digests_cannot(sides):
    sides.policy.call_all("shift_embedding_rows", 1)
    with pytest.raises(InputError) as caught:
        sides.sync(1)
    assert caught.value.name.startswith("probe of engine")
    assert str(caught.value) in sides.history()[-1], "the engines refuse with the reason"
    assert "resume" not in sides.history()
    sides.policy.call_all("shift_embedding_rows", 0)
    assert sides.coordinator.sync_weights(sides.engines, 1)["probe_gap"] == 0


def test_new_and_replaced_engines_get_the_current_version_without_pausing_others(sides):
    sides.sync(1)
    before, engines = sides.history(), sides.engines
    engines.wait_started(engines.respawn_engine(1))
    assert engines.routable_engines == [0]
    assert sides.coordinator.sync_new_engines([1])
    sides.check_received(1)
    assert sides.history() == before
    engines.enable_routing(1)
    sides.sync(2)
    sides.check_received(2)


def test_ranks_leave_a_link_that_not_all_have_joined(sides, monkeypatch):
    """Else a rank keeps its buffers, of which there may be few where an engine was killed."""
    gather = sides.weight_sync._gather

    def gather_and_fail(operation, calls):
        results = gather(operation, calls)
        if operation == "joining the weight transfer":
            raise RemoteCallError("engine 1 was killed", operation, ["engine 1"])
        return results

    with monkeypatch.context() as patch:
        patch.setattr(sides.weight_sync, "_gather", gather_and_fail)
        with pytest.raises(RemoteCallError):
            sides.weight_sync.connect([0, 1])
    assert set(gather("links", sides.policy.submit_to_ranks("num_links")).values()) == {0}
    sides.sync(1)
    assert set(gather("links", sides.policy.submit_to_ranks("num_links")).values()) == {1}
    sides.check_received(1)


def test_link_that_failed_to_close_is_not_used_again(sides):
    sides.sync(1)
    sides.policy.call_all("fail_to_leave")
    with pytest.raises(RemoteCallError):
        sides.weight_sync.disconnect()
    sides.sync(2)
    sides.check_received(2)


def test_engine_replaced_while_the_policy_is_ahead_joins_a_new_link(sides):
    sides.sync(1)
    engines = sides.engines
    sides.coordinator._has_unsynced_weights = True
    sides.lose_engine(1)
    engines.wait_started(engines.respawn_engine(1))
    engines.registry.mark_started(1)
    assert not sides.coordinator.sync_new_engines([1])
    sides.sync(2)
    assert engines.routable_engines == [0, 1]
    sides.check_received(2)


@pytest.mark.extended
def test_sync_waits_for_a_replacement_when_all_engines_are_lost(sides):
    for index in (0, 1):
        sides.lose_engine(index)
    with pytest.raises(NoEngineLeftError):
        sides.sync(1)
    sides.coordinator.start()
    sides.sync(1)
    ends_at = time.monotonic() + 300
    while sides.engines.routable_engines != [0, 1]:  # the second one may come after the sync
        assert time.monotonic() < ends_at
        time.sleep(0.02)
    assert sides.engines.registry.num_replaced == 2
    sides.check_received(1)


def test_new_engine_waits_while_the_policy_is_ahead_or_busy(sides):
    sides.sync(1)
    coordinator = sides.coordinator
    coordinator._has_unsynced_weights = True
    assert not coordinator.sync_new_engines([1])
    coordinator.sync_weights(sides.engines, 2)
    with coordinator._lock, ThreadPoolExecutor(1) as other:
        assert not other.submit(coordinator.sync_new_engines, [1]).result()
    assert coordinator.sync_new_engines([1])


@pytest.fixture
def shared(sides):
    """Both sides on the same GPUs, with the first version synced."""
    sides.share_gpus()
    sides.sync(1)
    sides.check_received(1)
    return sides


UPDATE = ["wake_up", "weights", "pause", "receive_weights", "verify_weights"]
SERVE = ["wake_up", "cache", "compute_prompt_log_probs", "resume"]
FIRST = ["wake_up", "weights", "layout", "join_weight_transfer", *UPDATE[2:], *SERVE]


def test_colocated_policy_is_offloaded_before_the_kv_cache_wakes(shared):
    assert shared.history() == FIRST
    assert shared.policy.call_all("gpu_resident_parts") == [frozenset(), frozenset()]
    assert shared.gpus.owner is GpuOwner.engines
    shared.coordinator.sync_weights(shared.engines, 1)
    shared.check_received(1)
    assert shared.history() == [*FIRST, "sleep", *UPDATE, *SERVE]


def test_colocated_new_engine_is_synced_together_with_all_others(shared):
    engines = shared.engines
    shared.lose_engine(1)
    with shared.gpus.reserve_for_engine_start():
        engines.wait_started(engines.respawn_engine(1))
    engines.registry.mark_started(1)
    assert shared.coordinator.sync_new_engines([1])
    assert engines.routable_engines == [0, 1]
    shared.check_received(1)
    join = ["sleep", "wake_up", "weights", "join_weight_transfer"]
    assert shared.history() == [*FIRST, *join, *UPDATE[2:], *SERVE]
    shared.load_policy()
    assert not shared.coordinator.sync_new_engines([1]), "the policy has the GPUs"


def test_colocated_policy_is_offloaded_while_an_engine_starts(shared):
    shared.load_policy()
    resident_parts, respawn = [], shared.engines.respawn_engine

    def respawn_engine(index):
        resident_parts.extend(shared.policy.call_all("gpu_resident_parts"))
        return respawn(index)

    shared.engines.respawn_engine = respawn_engine
    shared.coordinator.start()
    shared.lose_engine(1)
    shared.sync(2)
    assert resident_parts == [frozenset(), frozenset()]
    assert shared.engines.routable_engines == [0, 1]
    shared.check_received(2)


# Tests that kill processes come last, because every later test would have to start new ones.


@pytest.mark.extended
def test_dead_engine_is_named_and_other_engines_refuse_with_the_reason(sides, processes):
    sides.weight_sync.connect([0, 1])
    dead = sides.engines._actors[1]
    processes.kill(dead)
    wait_until_dead(dead.check_health)
    with pytest.raises(ProcessDiedError) as caught:
        sides.coordinator.sync_weights(sides.engines, 1)
    assert (caught.value.operation, caught.value.process_name) == ("pause", "engine 1")
    assert "engine 1 died" in sides.history()[-1]


def test_engine_that_died_before_a_sync_is_replaced_and_gets_the_weights(sides, processes):
    sides.sync(1)
    sides.coordinator.start()
    processes.kill(sides.engines._actors[1])
    sides.sync(2)
    assert sides.engines.registry.num_replaced == 1
    assert sides.engines.routable_engines == [0, 1]
    sides.check_received(2)


def test_engine_that_dies_while_the_first_link_opens_is_replaced(sides, processes):
    sides.coordinator.start()
    processes.kill(sides.engines._actors[1])
    assert sides.coordinator.connect().num_trainer_ranks == NUM_RANKS
    assert sides.engines.registry.num_replaced == 1
    sides.sync(1)
    assert sides.engines.routable_engines == [0, 1]
    sides.check_received(1)


def test_dead_policy_rank_is_named(sides, processes):
    sides.weight_sync.connect([0, 1])
    dead = sides.policy._actors[1]
    processes.kill(dead)
    wait_until_dead(dead.find_free_address)
    with pytest.raises(PolicyRankDiedError) as caught:
        sides.coordinator.sync_weights(sides.engines, 1)
    assert caught.value.processes == ("policy rank 1",)
