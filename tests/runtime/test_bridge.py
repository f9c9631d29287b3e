"""The bridge over real process groups: two tensor-parallel ranks to two sinks, without vLLM."""

import json
import time

import pytest
import ray
import torch

from mega_agentrl.config.schema import ClusterConfig, EngineConfig, ModelConfig, TrainConfig
from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import hf_shapes, megatron_layout
from mega_agentrl.reshard.place import Place
from mega_agentrl.reshard.transport import ShardReceiver
from mega_agentrl.runtime.bridge import WeightBridge
from mega_agentrl.runtime.generator_group import GeneratorGroup
from mega_agentrl.runtime.policy_group import PolicyActor, PolicyGroup
from mega_agentrl.runtime.remote import RemoteError

NUM_RANKS = 2


def hf_tensors(folder, version):
    """Every element of every tensor differs, and differs between versions."""
    generator = torch.Generator().manual_seed(version)
    shapes = hf_shapes(ModelShape.from_folder(folder))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Shards:
    """What `PolicyRank` offers the bridge, with weights that follow `set_version`."""

    def __init__(self, folder, rank):
        self.folder = folder
        shape = ModelShape.from_folder(folder)
        self.shards = megatron_layout(shape, Place(tensor_rank=rank, tensor_size=NUM_RANKS))
        self.set_version(0)

    def set_version(self, version):
        tensors = hf_tensors(self.folder, version)
        self.parameters = {}
        for shard in self.shards:
            local = torch.zeros(shard.shape)
            for block in shard.blocks:
                local[block.local_rect.slices] = tensors[block.hf_name][block.hf_rect.slices]
            self.parameters[shard.name] = local

    def layout(self):
        return self.shards

    def parameter(self, name):
        return self.parameters[name]


class Rank(PolicyActor):
    def start(self, host, port):
        self._policy = Shards(self._config.model.path, self._rank)


@ray.remote(num_cpus=0)
class Sink:
    """The receiving half of an engine with one worker."""

    def call(self, method, *args):
        return getattr(self, method)(*args)

    def connect_weights(self, link):
        self.receiver = ShardReceiver.join(link, sink=0)

    def receive_weights(self, version):
        self.tensors = dict(self.receiver.receive(version))

    def received(self):
        return self.tensors


@pytest.fixture
def sides(ray_local, tmp_path):
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
    (tmp_path / "config.json").write_text(json.dumps(sizes | config_json))
    config = TrainConfig(
        model=ModelConfig(path=str(tmp_path)),
        engine=EngineConfig(tensor=1),
        cluster=ClusterConfig(num_engines=2, actor_deadline_s=60),
    )
    rank_class = ray.remote(num_cpus=0)(Rank)
    ranks = [
        rank_class.remote(config, rank, NUM_RANKS, str(tmp_path / f"{rank}.log"))
        for rank in range(NUM_RANKS)
    ]
    ray.get([rank.start.remote("", 0) for rank in ranks], timeout=60)
    sinks = [Sink.remote() for _ in range(2)]
    yield PolicyGroup(ranks, config), GeneratorGroup(sinks, config), config, sinks
    for actor in [*ranks, *sinks]:
        ray.kill(actor)


def test_every_engine_gets_every_tensor_of_each_version(sides, tmp_path):
    policy, engines, config, sinks = sides
    bridge = WeightBridge(policy, engines, config, dtype="float32")
    bridge.connect()
    for version in (1, 2):
        policy.call_all("set_version", version)
        sent = bridge.send(engines, version)
        expected = hf_tensors(tmp_path, version)
        assert engines.version == version
        assert sent["bytes_per_worker"] == sum(4 * t.numel() for t in expected.values())
        for sink in sinks:
            received = ray.get(sink.received.remote(), timeout=30)
            assert received.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(received[name], tensor), name


def kill(actor):
    """Kill an actor and wait until it is dead: what comes before that may well succeed."""
    ray.kill(actor)
    ends_at = time.monotonic() + 60
    while time.monotonic() < ends_at:
        try:
            ray.get(actor.layout.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            return
    raise AssertionError("the actor is still alive")


def test_a_dead_rank_is_named_and_the_version_stays(sides):
    policy, engines, config, _ = sides
    bridge = WeightBridge(policy, engines, config, dtype="float32")
    bridge.connect()
    kill(policy._actors[1])
    with pytest.raises(RemoteError, match=r"transfer of weight version 1.*(rank 1|engine \d)"):
        bridge.send(engines, 1)
    assert engines.version == 0


def test_only_the_attached_generator_is_served(sides):
    policy, engines, config, _ = sides
    bridge = WeightBridge(policy, engines, config, dtype="float32")
    bridge.connect()
    with pytest.raises(ValueError, match="the generator this policy is attached to"):
        bridge.send(GeneratorGroup([], config), 1)
