"""Weight synchronization over real process groups: two tensor-parallel ranks, fake engines."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray
import torch

from mega_agentrl.config.enums import TransportKind
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig, EngineConfig, WeightSyncConfig
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.runtime.coordinator import Coordinator
from mega_agentrl.runtime.remote_calls import RemoteCallError
from mega_agentrl.runtime.weight_sync import WeightSynchronizer
from mega_agentrl.runtime.workers.generator_group import GeneratorGroup
from mega_agentrl.runtime.workers.gpu_time_sharing import GpuOwner, GpuTimeSharing
from mega_agentrl.runtime.workers.policy_group import PolicyGroup
from tests.reshard.faults import cut
from tests.reshard.rollout_cuts import rollout_layout
from tests.runtime.weight_sync_processes import NUM_RANKS, FakeEngine, FakeRank, hf_tensors


class Processes:
    """Rank and engine processes that the tests share; a killed one is started again."""

    def __init__(self, config, folder):
        self.config, self.folder = config, folder
        self.ranks, self.rollout_ranks, self.spares = [None] * NUM_RANKS, [], []

    def start_all(self):
        """Return both ranks and two engines in their initial state."""
        for rank, actor in enumerate(self.ranks):
            log_file = str(self.folder / f"{rank}.log")
            self.ranks[rank] = actor or REMOTE_RANK.remote(self.config, rank, NUM_RANKS, log_file)
        self.spares, self.rollout_ranks = self.rollout_ranks, []
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
        ray.kill(actor)

    def drop_replaced(self, engines):
        """Forget the engine processes that were replaced: they are dead."""
        self.rollout_ranks = [
            one for one in self.rollout_ranks if one in engines._actors
        ] + self.spares


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
        engine=EngineConfig(tensor_parallel_size=1),
        cluster=ClusterConfig(num_engines=2, call_timeout_s=100),
    )
    made = Processes(config, folder)
    yield made
    for actor in [*made.ranks, *made.rollout_ranks]:
        if actor is not None:
            ray.kill(actor)


@pytest.fixture
def sides(processes):
    ranks, sinks = processes.start_all()
    config = processes.config
    policy, engines = PolicyGroup(ranks, config), GeneratorGroup(sinks, config, processes.spawn)
    weight_sync = WeightSynchronizer(policy, engines, config, dtype="float32")
    coordinator = Coordinator(policy, engines, weight_sync, None)
    yield policy, engines, coordinator
    coordinator._supervisor.close()
    processes.drop_replaced(engines)


def call_engine(engines, index, method, *args):
    (answer,) = ray.get(list(engines.submit(method, *args, only=[index]).values()), timeout=300)
    return answer


def check_received(engines, folder, version, only=(0, 1)):
    shape = ModelShape.from_folder(folder)
    expected = cut(rollout_layout(shape, 0, 1), hf_tensors(folder, version))
    for index in only:
        received = call_engine(engines, index, "received")
        assert received.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(received[name], tensor), name


def test_every_engine_receives_its_shard_of_each_version(sides, folder):
    policy, engines, coordinator = sides
    own = sum(4 * t.numel() for t in hf_tensors(folder, 1).values())
    for version in (1, 2):
        policy.call_all("set_version", version)
        sent = coordinator.sync_weights(engines, version)
        assert engines.version == version
        assert sent["bytes_per_worker"] == own
        assert sent["probe_gap"] == 0
        assert sent["total_s"] > 0
        check_received(engines, folder, version)
    order = ["layout", "join_weight_transfer"]
    order += [
        "pause",
        "receive_weights",
        "verify_weights",
        "compute_prompt_log_probs",
        "resume",
    ] * 2
    assert call_engine(engines, 0, "history") == order


def test_a_transport_that_cannot_connect_the_ranks_is_refused(sides, processes):
    policy, engines, _ = sides
    config = replace(processes.config, weight_sync=WeightSyncConfig(transport=TransportKind.nccl))
    with pytest.raises(ConfigError) as raised:
        WeightSynchronizer(policy, engines, config, dtype="float32").connect([0, 1])
    assert (raised.value.key, raised.value.got) == ("weight_sync.transport", "nccl")


def test_corrupted_engine_fails_verification_and_recovers(sides, folder):
    policy, engines, coordinator = sides
    policy.call_all("set_version", 1)
    coordinator.sync_weights(engines, 1)
    call_engine(engines, 1, "corrupt", "model.layers.1.mlp.down_proj.weight")
    with pytest.raises(
        RemoteCallError, match=r"version 2 failed on engine 1.*layers\.1\.mlp\.down"
    ):
        coordinator.sync_weights(engines, 2)
    assert engines.version == 1
    for index in (0, 1):
        assert "the update to version 2 failed" in call_engine(engines, index, "history")[-1]
    call_engine(engines, 1, "corrupt", None)
    policy.call_all("set_version", 3)
    coordinator.sync_weights(engines, 3)
    check_received(engines, folder, 3)


def test_diverged_replicas_are_named(sides):
    policy, engines, coordinator = sides
    policy.call_all("set_version", 1, True)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.* trainer ranks 0 and 1"):
        coordinator.sync_weights(engines, 1)
    assert "drifted apart" in call_engine(engines, 0, "history")[-1]


def test_probe_detects_errors_that_digests_cannot(sides):
    policy, engines, coordinator = sides
    policy.call_all("set_version", 1)
    policy.call_all("shift_embedding_rows", 1)
    with pytest.raises(ValueError, match=r"probe: engine [01] and the policy disagree"):
        coordinator.sync_weights(engines, 1)
    assert "probe: engine" in call_engine(engines, 0, "history")[-1]
    assert call_engine(engines, 0, "history").count("resume") == 0
    policy.call_all("shift_embedding_rows", 0)
    assert coordinator.sync_weights(engines, 1)["probe_gap"] == 0


def test_new_and_replaced_engines_get_the_current_version_without_pausing_others(sides, folder):
    policy, engines, coordinator = sides
    policy.call_all("set_version", 1)
    coordinator.sync_weights(engines, 1)
    before = call_engine(engines, 0, "history")
    engines.wait_started(engines.respawn_engine(1))
    assert engines.routable_engines == [0]
    assert coordinator.sync_new_engines([1])
    check_received(engines, folder, 1)
    assert call_engine(engines, 0, "history") == before
    engines.enable_routing(1)
    policy.call_all("set_version", 2)
    coordinator.sync_weights(engines, 2)
    check_received(engines, folder, 2)


def test_link_that_failed_to_close_is_not_used_again(sides, folder):
    policy, engines, coordinator = sides
    policy.call_all("set_version", 1)
    coordinator.sync_weights(engines, 1)
    policy.call_all("fail_to_leave")
    with pytest.raises(RemoteCallError):
        coordinator._weight_sync.disconnect()
    policy.call_all("set_version", 2)
    coordinator.sync_weights(engines, 2)
    check_received(engines, folder, 2)


def test_engine_replaced_while_the_policy_is_ahead_joins_a_new_link(sides, folder):
    policy, engines, coordinator = sides
    policy.call_all("set_version", 1)
    coordinator.sync_weights(engines, 1)
    coordinator._has_unsynced_weights = True
    engines.report_lost(1, engines.actor(1), "lost")
    engines.wait_started(engines.respawn_engine(1))
    engines.registry.mark_started(1)
    assert not coordinator.sync_new_engines([1])
    policy.call_all("set_version", 2)
    coordinator.sync_weights(engines, 2)
    assert engines.routable_engines == [0, 1]
    check_received(engines, folder, 2)


def test_engine_that_died_before_a_sync_is_replaced_and_gets_the_weights(sides, processes, folder):
    policy, engines, coordinator = sides
    policy.call_all("set_version", 1)
    coordinator.sync_weights(engines, 1)
    coordinator.start()
    processes.kill(engines._actors[1])
    policy.call_all("set_version", 2)
    coordinator.sync_weights(engines, 2)
    assert engines.registry.num_replaced == 1
    assert engines.routable_engines == [0, 1]
    check_received(engines, folder, 2)


def test_sync_waits_for_a_replacement_when_all_engines_are_lost(sides, folder):
    policy, engines, coordinator = sides
    policy.call_all("set_version", 1)
    for index in (0, 1):
        engines.report_lost(index, engines.actor(index), "lost")
    with pytest.raises(RemoteCallError, match="no engine is left"):
        coordinator.sync_weights(engines, 1)
    coordinator.start()
    coordinator.sync_weights(engines, 1)
    assert (engines.registry.num_replaced, engines.routable_engines) == (2, [0, 1])
    check_received(engines, folder, 1)


def test_new_engine_waits_while_the_policy_is_ahead_or_busy(sides, folder):
    policy, engines, coordinator = sides
    policy.call_all("set_version", 1)
    coordinator.sync_weights(engines, 1)
    coordinator._has_unsynced_weights = True
    assert not coordinator.sync_new_engines([1])
    coordinator.sync_weights(engines, 2)
    with coordinator._lock, ThreadPoolExecutor(1) as other:
        assert not other.submit(coordinator.sync_new_engines, [1]).result()
    assert coordinator.sync_new_engines([1])


def test_dead_policy_rank_is_named(sides, processes):
    policy, engines, coordinator = sides
    coordinator._weight_sync.connect([0, 1])
    processes.kill(policy._actors[1])
    with pytest.raises(RemoteCallError, match=r"rank 1"):
        coordinator.sync_weights(engines, 1)


def test_dead_engine_is_named_and_other_engines_refuse_with_the_reason(sides, processes):
    _, engines, coordinator = sides
    coordinator._weight_sync.connect([0, 1])
    processes.kill(engines._actors[1])
    with pytest.raises(ray.exceptions.RayActorError):
        while True:  # calls still get through for a moment
            call_engine(engines, 1, "history")
    with pytest.raises(RemoteCallError, match="pause: engine 1 died"):
        coordinator.sync_weights(engines, 1)
    assert "engine 1 died" in call_engine(engines, 0, "history")[-1]


def test_unattached_generator_is_rejected(sides):
    _, _, coordinator = sides
    with pytest.raises(ValueError, match="attached to"):
        coordinator.sync_weights(object(), 1)


@pytest.fixture
def shared(sides):
    """Policy and engines on the same GPUs, which the policy holds at first."""
    policy, engines, separate = sides
    gpus = GpuTimeSharing(policy, engines)
    coordinator = Coordinator(policy, engines, separate._weight_sync, gpus)
    yield policy, engines, coordinator, gpus
    coordinator._supervisor.close()


UPDATE = ["wake_up", "weights", "pause", "receive_weights", "verify_weights"]
SERVE = ["wake_up", "cache", "compute_prompt_log_probs", "resume"]


def history_since(engines, index, before):
    new = call_engine(engines, index, "history")
    return new[len(before) :]


def test_colocated_policy_is_offloaded_before_the_kv_cache_wakes(shared, folder):
    policy, engines, coordinator, gpus = shared
    policy.call_all("set_version", 1)
    coordinator.sync_weights(engines, 1)
    check_received(engines, folder, 1)
    history = call_engine(engines, 0, "history")
    assert history == ["wake_up", "weights", "layout", "join_weight_transfer", *UPDATE[2:], *SERVE]
    assert policy.call_all("gpu_resident_parts") == [frozenset(), frozenset()]
    assert gpus.owner is GpuOwner.engines
    coordinator.sync_weights(engines, 1)
    check_received(engines, folder, 1)
    assert history_since(engines, 0, history) == ["sleep", *UPDATE, *SERVE]


def test_colocated_new_engine_is_synced_together_with_all_others(shared, folder):
    policy, engines, coordinator, gpus = shared
    policy.call_all("set_version", 1)
    coordinator.sync_weights(engines, 1)
    before = call_engine(engines, 0, "history")
    engines.report_lost(1, engines.actor(1), "lost")
    with gpus.reserve_for_engine_start():
        engines.wait_started(engines.respawn_engine(1))
    engines.registry.mark_started(1)
    assert coordinator.sync_new_engines([1])
    assert engines.routable_engines == [0, 1]
    check_received(engines, folder, 1)
    assert history_since(engines, 0, before) == [
        "sleep",
        "wake_up",
        "weights",
        "join_weight_transfer",
        *UPDATE[2:],
        *SERVE,
    ]
    gpus.acquire_for_policy()
    assert not coordinator.sync_new_engines([1]), "the policy has the GPUs"


def test_colocated_policy_is_offloaded_while_an_engine_starts(shared, processes, folder):
    policy, engines, coordinator, gpus = shared
    policy.call_all("set_version", 1)
    coordinator.sync_weights(engines, 1)
    gpus.acquire_for_policy()
    seen, respawn = [], engines.respawn_engine

    def watched(index):
        seen.extend(policy.call_all("gpu_resident_parts"))
        return respawn(index)

    engines.respawn_engine = watched
    coordinator.start()
    processes.kill(engines._actors[1])
    policy.call_all("set_version", 2)
    coordinator.sync_weights(engines, 2)
    assert seen == [frozenset(), frozenset()]
    assert engines.routable_engines == [0, 1]
    check_received(engines, folder, 2)
