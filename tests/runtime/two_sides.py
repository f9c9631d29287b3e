"""Both sides of a bridge as small processes: two tensor-parallel ranks, engines with one worker."""

import ray
import torch

from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import EMBEDDING, hf_shapes, megatron_layout
from mega_agentrl.reshard.place import Place
from mega_agentrl.reshard.proof import Regions
from mega_agentrl.reshard.transport import join
from mega_agentrl.reshard.whereabouts import here
from mega_agentrl.runtime.policy_group import PolicyActor
from tests.reshard.fake_rollout import PlainLanding
from tests.reshard.faults import cut
from tests.reshard.rollout_cuts import rollout_layout

NUM_RANKS = 2


def hf_tensors(folder, version):
    """Every element of every tensor differs, and differs between versions."""
    generator = torch.Generator().manual_seed(version)
    shapes = hf_shapes(ModelShape.from_folder(folder))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def logps_of(embedding, prompt):
    """Stands for a model's log-probs: they depend on the weights and on the tokens."""
    return [float(embedding[token].sum()) for token in prompt[1:]]


class Shards:
    """What `PolicyRank` offers the bridge, with weights that follow `set_version`."""

    def __init__(self, folder, rank):
        self.folder, self.rank, self.shift = folder, rank, 0
        self.parts = {"weights"}
        shape = ModelShape.from_folder(folder)
        self.shards = megatron_layout(shape, Place(tensor_rank=rank, tensor_size=NUM_RANKS))
        self.set_version(0)

    def set_version(self, version, drift=False):
        self.tensors = hf_tensors(self.folder, version)
        self.parameters = cut(self.shards, self.tensors)
        if drift and self.rank:
            self.parameters["decoder.final_layernorm.weight"] += 1e-6

    def layout(self):
        return self.shards

    def parameter(self, name):
        assert "weights" in self.parts, "sent from host memory"
        return self.parameters[name]

    def occupy(self, parts):
        self.parts = parts

    def occupied(self):
        return self.parts

    def probe(self, prompt):
        assert "weights" in self.parts, "a forward pass without weights"
        embedding = self.tensors[EMBEDDING].roll(self.shift, 0)
        return None if self.rank else logps_of(embedding, prompt)

    def mean_rows_shifted_by(self, shift):
        """Use other rows for a token than the checkpoint means."""
        self.shift = shift


class Rank(PolicyActor):
    def start(self, host, port):
        """Be as new."""
        for key in list(self._links):
            self.leave(key)
        self._policy = Shards(self._config.model.path, self._rank)


@ray.remote(num_cpus=0)
class Sink:
    """An engine with one worker; notes what it is told to do."""

    def __init__(self, folder):
        self.wanted = rollout_layout(ModelShape.from_folder(folder), 0, 1)
        self.courier = None
        self.forget()

    def forget(self):
        """Be as new."""
        if self.courier is not None:
            self.courier.close()
        self.courier = self.mutilated = None
        self.landing = PlainLanding(self.wanted)
        self.told = []

    def start(self, model_path, seed, deadline_s):
        self.told.append("start")

    def call(self, method, *args):
        self.told.append(method)
        return getattr(self, method)(*args)

    def layout(self):
        return [(self.wanted, here())]

    def connect_weights(self, link):
        self.courier = join(link, link.plan.num_sources + link.first_sink, self.wanted)
        self.regions = Regions(self.wanted, link.plan.dtype_of)

    def receive_weights(self, version):
        self.regions.clear()
        try:
            self.courier.receive(self.landing, version)
        except (RuntimeError, ValueError):
            self.courier.close()
            raise
        if self.mutilated:
            self.landing.params[self.mutilated] += 1e-6
        self.regions.take((shard, self.landing.params[shard.name]) for shard in self.wanted)

    def confirm_weights(self, version, expected):
        if wrong := self.regions.mismatches(expected[0]):
            raise RuntimeError(f"proof failed: {wrong[0]}")

    def probe(self, prompt):
        return logps_of(self.landing.params[EMBEDDING], prompt)

    def mutilate(self, name):
        self.mutilated = name

    def pause(self):
        pass

    def resume(self):
        pass

    def sleep(self):
        self.landing = PlainLanding(self.wanted)

    def wake(self, part):
        self.told.append(part)

    def refuse(self, reason):
        self.told.append(reason)

    def received(self):
        return self.landing.params

    def history(self):
        return [word for word in self.told if word != "history"]
