"""Small processes for weight sync tests: two tensor-parallel ranks, engines of one worker."""

import ray
import torch

from mega_agentrl.config.sections.policy import LoraConfig
from mega_agentrl.reshard.adapters import AdapterReceiver, exact_product
from mega_agentrl.reshard.device_location import current_device_location
from mega_agentrl.reshard.layout import PackedLayout
from mega_agentrl.reshard.mapping.lora_layout import adapted_module, lora_shapes, lora_shards
from mega_agentrl.reshard.mapping.model_mapping import HF_EMBEDDING, hf_shapes, megatron_layout
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.mapping.partition import ModelParallelRank
from mega_agentrl.reshard.session import join_session
from mega_agentrl.reshard.verify.digest_verifier import ReceivedDigests
from mega_agentrl.runtime.workers.policy_group import PolicyActor
from tests.reshard.fake_rollout import PlainWeightWriter
from tests.reshard.faults import cut
from tests.reshard.rollout_cuts import rollout_layout

NUM_RANKS = 2
LORA = LoraConfig(rank=2, alpha=4.0)


def hf_tensors(folder, version):
    """Return tensors whose elements all differ, also between versions."""
    generator = torch.Generator().manual_seed(version)
    shapes = hf_shapes(ModelShape.from_folder(folder))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def lora_tensors(folder, version):
    """Return factors of adapters whose elements all differ, also between versions."""
    generator = torch.Generator().manual_seed(100 + version)
    shapes = hf_shapes(ModelShape.from_folder(folder))
    factor_shapes = lora_shapes(shapes, LORA.rank, LORA.targets)
    return {name: torch.randn(shape, generator=generator) for name, shape in factor_shapes.items()}


def merged_tensors(folder, version):
    """Return the weights of version 0 with the adapters of a version."""
    merged, factors = hf_tensors(folder, 0), lora_tensors(folder, version)
    for name, value in merged.items():
        if adapted_module(name, LORA.targets) is not None:
            module = name.removesuffix(".weight")
            product = exact_product(
                (factors[f"{module}.lora_B.weight"], factors[f"{module}.lora_A.weight"])
            )
            merged[name] = value + LORA.alpha / LORA.rank * product
    return merged


def logps_of(embedding, prompt):
    """Return stand-in log-probs that depend on the weights and on the tokens."""
    return [float(embedding[token].sum()) for token in prompt[1:]]


class FakePolicyRank:
    """The weight sync part of `PolicyRank`, with weights that follow `set_version`."""

    def __init__(self, folder, rank):
        self.folder, self.rank, self.shift = folder, rank, 0
        self.fails_to_leave = self.has_adapters = False
        self.resident_parts = {"weights"}
        shape = ModelShape.from_folder(folder)
        self.shards = megatron_layout(
            shape, ModelParallelRank(tensor_rank=rank, tensor_size=NUM_RANKS)
        )
        self.set_version(0)

    def set_version(self, version, drift=False):
        self.version = version
        self.tensors = hf_tensors(self.folder, 0 if self.has_adapters else version)
        self.parameters = cut(self.shards, self.tensors)
        if drift and self.rank:
            self.parameters["decoder.final_layernorm.weight"] += 1e-6

    def layout(self):
        return self.shards

    def adapter_layout(self):
        return lora_shards(self.shards, LORA.rank, LORA.targets)

    def parameter(self, name):
        assert "weights" in self.resident_parts, "sent from host memory"
        if not self.has_adapters:
            return self.parameters[name]
        shard = next(shard for shard in self.shards if shard.name == name)
        merged = merged_tensors(self.folder, self.version)
        return cut([shard], merged)[name]

    def stored_parameter(self, name):
        assert "weights" in self.resident_parts, "sent from host memory"
        factors = cut(self.adapter_layout(), lora_tensors(self.folder, self.version))
        return (self.parameters | factors)[name]

    def use_adapters(self):
        """From now on the version is that of adapters, over the weights of version 0."""
        self.has_adapters = True

    def set_gpu_resident(self, parts):
        self.resident_parts = parts

    def gpu_resident_parts(self):
        return self.resident_parts

    def compute_prompt_log_probs(self, prompt):
        assert "weights" in self.resident_parts, "a forward pass without weights"
        embedding = self.tensors[HF_EMBEDDING].roll(self.shift, 0)
        return None if self.rank else logps_of(embedding, prompt)

    def fail_to_leave(self):
        """Let the next `leave_weight_transfer` fail."""
        self.fails_to_leave = True

    def shift_embedding_rows(self, shift):
        """Roll the embedding rows, so that each token uses a wrong row."""
        self.shift = shift


class FakeRank(PolicyActor):
    def start(self, host, port):
        """Restore the initial state."""
        for key in list(self._links):
            self.leave_weight_transfer(key)
        self._policy = FakePolicyRank(self._config.model.path, self._rank)

    def call(self, method, *args):
        """Call a method that only tests have, too."""
        return getattr(self._policy, method)(*args)

    def num_links(self):
        """Number of links that this rank has joined and not left."""
        return len(self._links)

    def leave_weight_transfer(self, key):
        super().leave_weight_transfer(key)
        if self._policy.fails_to_leave:
            self._policy.fails_to_leave = False
            raise OSError("connection reset")


@ray.remote(num_cpus=0)
class FakeEngine:
    """An engine with one worker that records the methods called on it."""

    def __init__(self, folder):
        self.rank_layout = rollout_layout(ModelShape.from_folder(folder), 0, 1)
        self.executor = None
        self.reset()

    def reset(self):
        """Restore the initial state."""
        if self.executor is not None:
            self.executor.close()
        self.executor = self.corrupted_name = None
        self.writer = PlainWeightWriter(self.rank_layout)
        self.calls = []

    def start(self, model_path, seed, deadline_s):
        self.calls.append("start")

    def call(self, method, *args):
        self.calls.append(method)
        return getattr(self, method)(*args)

    def layout(self):
        return [(PackedLayout.pack(self.rank_layout), current_device_location())]

    def join_weight_transfer(self, link, first_rank):
        if link.content == "adapters":
            self.adapter_executor = join_session(link, first_rank, self.adapters.layout)
            return
        self.executor = join_session(link, first_rank, self.rank_layout)
        self.regions = ReceivedDigests(self.rank_layout, link.plan.dtype_of)
        if link.lora is not None:
            device = torch.device("cpu")
            self.adapters = AdapterReceiver(self.rank_layout, link.lora, torch.float32, device)

    def receive_weights(self, version, contents):
        self.calls += [str(content) for content in contents if content == "adapters"]
        self.regions.reset()
        try:
            if "weights" in contents:
                self.executor.receive(self.writer, version)
                self.below = {name: value.clone() for name, value in self.writer.params.items()}
            if "adapters" in contents:
                self.adapters.begin_update()
                self.adapter_executor.receive(self.adapters, version)
                for shard in self.rank_layout:
                    merged = self.adapters.merge(shard, self.below[shard.name])
                    self.writer.params[shard.name] = merged
        except (RuntimeError, ValueError):
            self.executor.close()
            raise
        if self.corrupted_name:
            self.writer.params[self.corrupted_name] += 1e-6
        self.regions.compute((shard, self.writer.params[shard.name]) for shard in self.rank_layout)

    def verify_weights(self, version, expected):
        if wrong := self.regions.find_mismatches(expected[0]):
            raise RuntimeError(f"verification failed: {wrong[0]}")

    def compute_prompt_log_probs(self, prompt):
        return logps_of(self.writer.params[HF_EMBEDDING], prompt)

    def corrupt(self, name):
        self.corrupted_name = name

    def check_health(self):
        pass

    def pause(self, hold):
        if hold:
            self.calls.append("hold")

    def resume(self):
        pass

    def sleep(self):
        self.writer = PlainWeightWriter(self.rank_layout)

    def wake_up(self, part):
        self.calls.append(part)

    def refuse_requests(self, reason):
        self.calls.append(reason)

    def received(self):
        return self.writer.params

    def history(self):
        return [word for word in self.calls if word not in ("history", "check_health", "received")]
