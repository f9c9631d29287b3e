"""The bridge over real process groups: two tensor-parallel ranks to sinks, without vLLM."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch

from mega_agentrl.config.schema import ClusterConfig, EngineConfig, ModelConfig, TrainConfig
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.runtime.bridge import WeightBridge
from mega_agentrl.runtime.generator_group import GeneratorGroup
from mega_agentrl.runtime.policy_group import PolicyGroup
from mega_agentrl.runtime.remote import RemoteError
from mega_agentrl.runtime.turns import Holder, Turns
from tests.reshard.faults import cut
from tests.reshard.rollout_cuts import rollout_layout
from tests.runtime.two_sides import NUM_RANKS, Rank, Sink, hf_tensors


class Processes:
    """Ranks and engines that one test after the other uses; who was ended is made anew."""

    def __init__(self, config, folder):
        self.config, self.folder = config, folder
        self.ranks, self.sinks, self.spares = [None] * NUM_RANKS, [], []

    def begin(self):
        """Both ranks, and two engines, as if they had just been started."""
        for rank, actor in enumerate(self.ranks):
            log_file = str(self.folder / f"{rank}.log")
            self.ranks[rank] = actor or REMOTE_RANK.remote(self.config, rank, NUM_RANKS, log_file)
        self.spares, self.sinks = self.sinks, []
        ray.get([actor.start.remote("", 0) for actor in self.ranks], timeout=300)
        ray.get([actor.forget.remote() for actor in self.spares], timeout=300)
        return self.ranks, [self.spawn(index) for index in range(2)]

    def spawn(self, index):
        self.sinks.append(self.spares.pop() if self.spares else Sink.remote(self.folder))
        return self.sinks[-1]

    def end(self, actor):
        self.ranks = [None if actor is one else one for one in self.ranks]
        self.sinks = [one for one in self.sinks if one is not actor]
        ray.kill(actor)

    def over(self, engines):
        """Engines whose place was taken are dead."""
        self.sinks = [one for one in self.sinks if one in engines._actors] + self.spares


REMOTE_RANK = ray.remote(num_cpus=0)(Rank)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bridge")
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
        engine=EngineConfig(tensor=1),
        cluster=ClusterConfig(num_engines=2, call_deadline_s=100),
    )
    made = Processes(config, folder)
    yield made
    for actor in [*made.ranks, *made.sinks]:
        if actor is not None:
            ray.kill(actor)


@pytest.fixture
def sides(processes):
    ranks, sinks = processes.begin()
    config = processes.config
    policy, engines = PolicyGroup(ranks, config), GeneratorGroup(sinks, config, processes.spawn)
    yield policy, engines, WeightBridge(policy, engines, config, dtype="float32")
    processes.over(engines)


def ask(engines, index, method, *args):
    (answer,) = ray.get(list(engines.start_call(method, *args, only=[index]).values()), timeout=300)
    return answer


def check_received(engines, folder, version, only=(0, 1)):
    shape = ModelShape.from_folder(folder)
    expected = cut(rollout_layout(shape, 0, 1), hf_tensors(folder, version))
    for index in only:
        received = ask(engines, index, "received")
        assert received.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(received[name], tensor), name


def test_every_engine_gets_its_bytes_of_each_version(sides, folder):
    policy, engines, bridge = sides
    own = sum(4 * t.numel() for t in hf_tensors(folder, 1).values())
    for version in (1, 2):
        policy.call_all("set_version", version)
        sent = bridge.send(engines, version)
        assert engines.version == version
        assert sent["bytes_per_worker"] == own
        assert sent["probe_gap"] == 0
        assert sent["seconds"] > 0
        check_received(engines, folder, version)
    order = ["layout", "connect_weights"]
    order += ["pause", "receive_weights", "confirm_weights", "probe", "resume"] * 2
    assert [word for word in ask(engines, 0, "history") if word != "received"] == order


def test_an_engine_that_holds_something_else_is_refused_and_recovers(sides, folder):
    policy, engines, bridge = sides
    policy.call_all("set_version", 1)
    bridge.send(engines, 1)
    ask(engines, 1, "mutilate", "model.layers.1.mlp.down_proj.weight")
    with pytest.raises(RemoteError, match=r"version 2 failed on engine 1.*layers\.1\.mlp\.down"):
        bridge.send(engines, 2)
    assert engines.version == 1
    for index in (0, 1):
        assert "the update to version 2 failed" in ask(engines, index, "history")[-1]
    ask(engines, 1, "mutilate", None)
    policy.call_all("set_version", 3)
    bridge.send(engines, 3)
    check_received(engines, folder, 3)


def test_replicas_that_drifted_apart_are_named(sides):
    policy, engines, bridge = sides
    policy.call_all("set_version", 1, True)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.* trainer ranks 0 and 1"):
        bridge.send(engines, 1)
    assert "drifted apart" in ask(engines, 0, "history")[-1]


def test_the_probe_sees_what_digests_cannot(sides):
    policy, engines, bridge = sides
    policy.call_all("set_version", 1)
    policy.call_all("mean_rows_shifted_by", 1)
    with pytest.raises(ValueError, match=r"probe: engine [01] gives a fixed prompt other"):
        bridge.send(engines, 1)
    assert "probe: engine" in ask(engines, 0, "history")[-1]
    assert ask(engines, 0, "history").count("resume") == 0
    policy.call_all("mean_rows_shifted_by", 0)
    assert bridge.send(engines, 1)["probe_gap"] == 0


def test_new_and_replaced_engines_get_the_current_version_and_the_others_go_on(sides, folder):
    policy, engines, bridge = sides
    policy.call_all("set_version", 1)
    bridge.send(engines, 1)
    before = ask(engines, 0, "history")
    replaced, starting = engines.begin_replace(1)
    assert (replaced, engines.admitted) == (1, [0])
    engines.finish_start(starting)
    added, starting = engines.begin_replace()
    engines.finish_start(starting)
    bridge.welcome([replaced, added])
    check_received(engines, folder, 1, only=(1, 2))
    assert ask(engines, 0, "history") == before
    engines.admit(replaced)
    engines.admit(added)
    policy.call_all("set_version", 2)
    bridge.send(engines, 2)
    check_received(engines, folder, 2, only=(0, 1, 2))


class Keeper:
    """Has made engines anew by the time it is asked."""

    def __init__(self, engines):
        self.fresh, self.engines, self.num_mended = set(), engines, 0
        self.is_replacing = False

    def lost(self, index, actor, why):
        self.engines.dismiss(index)

    def mend(self):
        self.num_mended += 1
        index, starting = self.engines.begin_replace(1)
        self.engines.finish_start(starting)
        self.fresh = {index}
        return True

    def wake(self):
        self.fresh.difference_update(self.engines.admitted)


def test_an_engine_that_dies_before_a_send_gets_the_weights_as_a_new_one(sides, processes, folder):
    policy, engines, bridge = sides
    policy.call_all("set_version", 1)
    bridge.send(engines, 1)
    keeper = Keeper(engines)
    bridge.keep(keeper)
    processes.end(engines._actors[1])
    policy.call_all("set_version", 2)
    bridge.send(engines, 2)
    assert keeper.num_mended == 1
    assert engines.admitted == [0, 1]
    check_received(engines, folder, 2)


def test_where_all_engines_are_lost_a_send_waits_for_a_new_one(sides, folder):
    policy, engines, bridge = sides
    policy.call_all("set_version", 1)
    for index in (0, 1):
        engines.dismiss(index)
    with pytest.raises(RemoteError, match="no engine is there"):
        bridge.send(engines, 1)
    keeper = Keeper(engines)
    bridge.keep(keeper)
    bridge.send(engines, 1)
    assert (keeper.num_mended, engines.admitted) == (1, [1])
    check_received(engines, folder, 1, only=(1,))


def test_a_new_engine_waits_while_the_policy_is_ahead_or_busy(sides, folder):
    policy, engines, bridge = sides
    policy.call_all("set_version", 1)
    bridge.send(engines, 1)
    policy.is_ahead = True
    assert not bridge.welcome([1])
    bridge.send(engines, 2)
    with policy.turn, ThreadPoolExecutor(1) as other:
        assert not other.submit(bridge.welcome, [1]).result()
    assert bridge.welcome([1])


def test_a_dead_policy_rank_is_named_and_the_engines_refuse(sides, processes):
    policy, engines, bridge = sides
    bridge.connect()
    processes.end(policy._actors[1])
    with pytest.raises(RemoteError, match=r"rank 1"):
        bridge.send(engines, 1)


def test_a_dead_engine_is_named_and_the_others_get_the_reason(sides, processes):
    _, engines, bridge = sides
    bridge.connect()
    processes.end(engines._actors[1])
    with pytest.raises(ray.exceptions.RayActorError):
        while True:  # calls still get through for a moment
            ask(engines, 1, "history")
    with pytest.raises(RemoteError, match="pause: engine 1 died"):
        bridge.send(engines, 1)
    assert "engine 1 died" in ask(engines, 0, "history")[-1]


def test_another_generator_is_refused(sides):
    _, _, bridge = sides
    with pytest.raises(ValueError, match="attached to"):
        bridge.send(object(), 1)


@pytest.fixture
def shared(sides):
    """Both sides on the same GPUs, with the policy's turn."""
    policy, engines, bridge = sides
    turns = Turns(policy, engines)
    policy.share(turns)
    policy.attach(bridge)
    bridge._turns = turns
    return policy, engines, bridge, turns


UPDATE = ["wake", "weights", "pause", "receive_weights", "confirm_weights"]
SERVE = ["wake", "cache", "probe", "resume"]


def since(engines, index, before):
    new = [word for word in ask(engines, index, "history") if word != "received"]
    return new[len(before) :]


def test_on_shared_gpus_the_policy_leaves_before_the_cache_wakes(shared, folder):
    policy, engines, bridge, turns = shared
    policy.call_all("set_version", 1)
    bridge.send(engines, 1)
    check_received(engines, folder, 1)
    told = [word for word in ask(engines, 0, "history") if word != "received"]
    assert told == ["wake", "weights", "layout", "connect_weights", *UPDATE[2:], *SERVE]
    assert policy.call_all("occupied") == [frozenset(), frozenset()]
    assert turns.holder is Holder.engines
    bridge.send_again()
    check_received(engines, folder, 1)
    assert since(engines, 0, told) == ["sleep", *UPDATE, *SERVE]


def test_on_shared_gpus_a_new_engine_gets_its_weights_with_all_others(shared, folder):
    policy, engines, bridge, turns = shared
    policy.call_all("set_version", 1)
    bridge.send(engines, 1)
    before = [word for word in ask(engines, 0, "history") if word != "received"]
    keeper = Keeper(engines)
    engines.keep(keeper)
    bridge.keep(keeper)
    with turns.start_of_engine():
        keeper.mend()
    assert bridge.welcome([1])
    assert engines.admitted == [0, 1]
    check_received(engines, folder, 1)
    assert since(engines, 0, before) == [
        "sleep",
        "wake",
        "weights",
        "connect_weights",
        *UPDATE[2:],
        *SERVE,
    ]
    turns.to_policy()
    assert not bridge.welcome([1]), "the policy has the GPUs"


def test_on_shared_gpus_the_policy_leaves_for_the_start_of_an_engine(shared, processes, folder):
    policy, engines, bridge, turns = shared
    policy.call_all("set_version", 1)
    bridge.send(engines, 1)
    turns.to_policy()
    keeper, seen = Keeper(engines), []
    engines.keep(keeper)
    bridge.keep(keeper)
    mend = keeper.mend

    def watched():
        with turns.start_of_engine():
            seen.extend(policy.call_all("occupied"))
            return mend()

    keeper.mend = watched
    processes.end(engines._actors[1])
    policy.call_all("set_version", 2)
    bridge.send(engines, 2)
    assert seen == [frozenset(), frozenset()]
    assert engines.admitted == [0, 1]
    check_received(engines, folder, 2)
