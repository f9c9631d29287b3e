"""A policy group and engines that share GPUs, in this process.

The group's own time sharing around fake ranks, and a weight sync that only sets the version. Each
side checks that it holds what it needs, and records what it does in one list.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from mega_agentrl.batch.packed_rows import PackedScores
from mega_agentrl.runtime.coordinator import Coordinator
from mega_agentrl.runtime.workers.batch_sender import BatchSender
from mega_agentrl.runtime.workers.engine_registry import EngineRegistry
from mega_agentrl.runtime.workers.gpu_time_sharing import ALL_STATE, GpuTimeSharing, ModelTurns
from mega_agentrl.runtime.workers.policy_group import PolicyGroup
from tests.estimate.shapes import config_folder
from tests.fakes import FakeGenerator
from tests.train.conftest import FakePolicy


class Ranks(PolicyGroup):
    """A `PolicyGroup` whose only rank is a `FakePolicy` here."""

    def __init__(self, config, calls):
        super().__init__([None], config)
        shape = replace(config.model, path=config_folder())
        self._sender = BatchSender(replace(config, model=shape), put=lambda shard: shard)
        self.calls, self.fake, self.parts = calls, FakePolicy(), ALL_STATE

    def submit_each(self, method, arguments):
        assert method == "call"
        return {"policy rank 0": arguments[0]}

    def gather(self, operation, calls):
        return {name: self.answer(method, args) for name, (method, *args) in calls.items()}

    def answer(self, method, args):
        if method == "set_gpu_resident":
            (self.parts,) = args
            self.calls.append(f"policy: {'+'.join(sorted(self.parts)) or 'nothing'}")
            return None
        if method == "save_result":
            return FakePolicy.save_result(self.fake, *args)
        assert self.parts == ALL_STATE, f"{method} with {self.parts}"
        self.calls.append(method)
        if method == "compute_log_probs":
            rows = args[0].rows
            zeros_M = np.zeros(rows.response_start_R1[-1], dtype=np.float32)
            return PackedScores(row_R=rows.row_R, values=(zeros_M, zeros_M))
        if method == "start_save":
            folder = Path(args[0])
            self.calls[-1] = f"save {folder.name.partition('.')[0]}"
            return FakePolicy.start_save(self.fake, folder)
        if method == "load_checkpoint":
            return self.fake.load_checkpoint(Path(args[0]))
        if method in ("update", "sft_step"):
            return self.fake._stats(int(args[0].targets.mask_M.sum()))
        return None

    def restart(self):
        """As `PolicyGroup.restart`, with a rank that needs no process."""
        self.calls.append("restart")
        self.parts = ALL_STATE


class Engines(FakeGenerator):
    """Generates only while it has weights and cache."""

    def begin(self, calls):
        self.calls, self.has, self.last_node = calls, set(), None
        self.registry = EngineRegistry(1)
        return self

    def serve_version(self, version, engines):
        self.version = version

    def sleep(self):
        self.calls.append("engines: sleep")
        self.has = set()

    def wake_up(self, part, engines):
        self.calls.append(f"engines: {part}")
        self.has.add(part)

    async def generate(self, request):
        assert self.has == {"weights", "cache"}, f"a request with {self.has}"
        if self.calls[-1] != "rollouts":
            self.calls.append("rollouts")
        return await super().generate(request)


class FakeWeightSync:
    """Stands in for `WeightSynchronizer`."""

    def __init__(self, policy, engines):
        self.policy, self.engines = policy, engines

    def sync(self, engines, version, release_policy):
        assert self.policy.parts == {"weights"}
        assert self.engines.has == {"weights"}
        self.policy.calls.append(f"sync {version}")
        release_policy()
        return {"total_s": 0.1}

    def reset_policy_ranks(self):
        pass


def share_gpus(components, config):
    """Replace policy and engines by ones that share GPUs; return the list of what they do."""
    calls = []
    policy, engines = Ranks(config, calls), Engines().begin(calls)
    models = ModelTurns(policy)
    components.policy = Coordinator(
        policy, engines, FakeWeightSync(policy, engines), models, GpuTimeSharing(models, engines)
    )
    components.generator = engines
    return calls
