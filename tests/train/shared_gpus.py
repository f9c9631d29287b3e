"""A policy group and engines that share GPUs, in this process: the group's own turn-taking around
fake ranks, and a bridge that does nothing but move the version.

Each side checks that it has what it needs, and notes what it does in one list.
"""

from pathlib import Path

import torch

from mega_agentrl.runtime.policy_group import PolicyGroup
from mega_agentrl.runtime.turns import EVERYTHING, Turns
from tests.fakes import FakeGenerator
from tests.train.conftest import FakePolicy


class Ranks(PolicyGroup):
    """A `PolicyGroup` whose only rank is a `FakePolicy` here."""

    def __init__(self, config, told):
        super().__init__([None], config)
        self.told, self.fake, self.parts = told, FakePolicy(), EVERYTHING

    def start_call(self, method, *args):
        return {"policy rank 0": (method, args)}

    def gather(self, operation, calls):
        return {name: self.answer(*call) for name, call in calls.items()}

    def answer(self, method, args):
        if method == "occupy":
            (self.parts,) = args
            self.told.append(f"policy: {'+'.join(sorted(self.parts)) or 'nothing'}")
            return None
        assert self.parts == EVERYTHING, f"{method} with {self.parts}"
        self.told.append(method)
        if method == "logprobs":
            batch = args[0]
            filled = torch.zeros(batch.response_BT.shape)
            return list(range(batch.num_rows)), filled, filled
        if method == "save":
            folder, extra, keep = args
            self.told[-1] = f"save {folder.rsplit('/', 1)[-1]}"
            return FakePolicy.save(self.fake, Path(folder), extra, keep)
        if method == "resume":
            return self.fake.resume(Path(args[0]))
        if method in ("update", "supervise"):
            return self.fake._stats(args[0])
        return None

    def restart(self):
        """As `PolicyGroup.restart`, with a rank that needs no process."""
        self._turns.renew_policy()
        self.told.append("restart")
        self.parts, self.is_ahead = EVERYTHING, True


class Engines(FakeGenerator):
    """Generates only while it has weights and cache."""

    def begin(self, told):
        self.told, self.has, self.last = told, set(), None
        return self

    def sleep(self):
        self.told.append("engines: sleep")
        self.has = set()

    def wake(self, part, only):
        self.told.append(f"engines: {part}")
        self.has.add(part)

    async def generate(self, request):
        assert self.has == {"weights", "cache"}, f"a request with {self.has}"
        if self.told[-1] != "rollouts":
            self.told.append("rollouts")
        return await super().generate(request)


class Bridge:
    """In the place of a `WeightBridge`."""

    def __init__(self, policy, engines, turns):
        self.policy, self.engines, self.turns = policy, engines, turns

    def send(self, generator, version):
        self.turns.to_transfer([0])
        assert self.policy.parts == {"weights"}
        assert self.engines.has == {"weights"}
        self.policy.told.append(f"send {version}")
        self.turns.to_engines([0])
        self.policy.is_ahead = False
        generator.version = version
        return {"seconds": 0.1}

    def send_again(self):
        self.send(self.engines, self.engines.version)


def share_gpus(parts, config):
    """Replace policy and engines of the parts; the list of what they do."""
    told = []
    policy, engines = Ranks(config, told), Engines().begin(told)
    turns = Turns(policy, engines)
    policy.share(turns)
    policy.attach(Bridge(policy, engines, turns))
    parts.policy, parts.generator = policy, engines
    return told
