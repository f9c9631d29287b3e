"""A whole run out of fakes: every part of the loop without Ray, Megatron or vLLM."""

import asyncio
import os

import pytest

from mega_agentrl.config.schema import (
    DataConfig,
    EngineConfig,
    EvaluateConfig,
    ReportConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from mega_agentrl.data.sft import Demonstration, DemonstrationSampler
from mega_agentrl.train import session
from mega_agentrl.types.batch import UpdateStats
from mega_agentrl.types.parts import Parts
from tests.fakes import CharCodec, FakeGenerator, FakeRubric, FakeTools, make_prompt
from tests.train.file_policy import FilePolicy


class FakePolicy(FilePolicy):
    """Notes the verbs it is told, in order; its log-probs are off by `gap` from the engine's."""

    gap = 0.25

    def __init__(self):
        super().__init__()
        self.verbs = []

    def save(self, folder, extra=None, keep=None):
        self.verbs.append(f"save {folder.name}")
        super().save(folder, extra, keep)

    def add_logprobs(self, batch):
        self.verbs.append("logprobs")
        return batch.with_fields(
            old_logp_BT=batch.rollout_logp_BT + self.gap, entropy_BT=batch.rollout_entropy_BT
        )

    def update(self, batch, kl_weight_BT=None):
        assert batch.advantage_BT is not None
        self.verbs.append("update")
        return self._stats(batch)

    def supervise(self, batch):
        self.verbs.append("supervise")
        return self._stats(batch)

    def _stats(self, batch):
        return UpdateStats(
            loss=0.5,
            grad_norm=1.0,
            learning_rate=0.1,
            num_tokens=int(batch.mask_BT.sum()),
            num_skipped=0,
            metrics={"clip_fraction": 0.0},
        )

    def reset_optimizer(self):
        self.verbs.append("reset")

    def send_weights(self, generator, version):
        self.verbs.append(f"send {version}")
        generator.version = version
        return {"seconds": 0.1}

    def begin_profile(self):
        self.verbs.append("begin profile")

    def end_profile(self, file):
        self.verbs.append(f"end profile {file.name}")

    def export(self, folder):
        self.verbs.append("export")


class Stream:
    """The prompts in order, over and over."""

    def __init__(self, prompts):
        self.prompts, self.at = prompts, 0

    def next(self, num_prompts):
        taken = [self.prompts[(self.at + i) % len(self.prompts)] for i in range(num_prompts)]
        self.at += num_prompts
        return taken

    def settle(self, prompts):
        pass

    def record(self, accuracies):
        self.accuracies = accuracies

    def put_back(self, prompts):
        assert not prompts, "this stream only goes forward"

    def state_dict(self):
        return {"at": self.at}


@pytest.fixture
def config(tmp_path):
    return TrainConfig(
        run_dir=str(tmp_path),
        total_steps=2,
        engine=EngineConfig(max_model_len=128),
        rollout=RolloutConfig(num_trajectories=4, max_response_tokens=60, max_turns=4),
        data=DataConfig(prompts_per_step=3),
        sft=SftConfig(batch_size=2),
        evaluate=EvaluateConfig(num_samples=2),
        report=ReportConfig(trackers=[]),
    )


@pytest.fixture
def bare_runs(monkeypatch):
    """Runs without page and picture, which take longer than the rest, and that no disk slows."""
    monkeypatch.setattr(session, "write_report", lambda folder: folder)
    monkeypatch.setattr(session, "write_curve", lambda *args: None)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def parts(tmp_path):
    prompts = [make_prompt(f"p{i}", f"Q{i}") for i in range(6)]
    runner = asyncio.Runner()
    demonstrations = [Demonstration((1, 2), (3, 4), (1, 1)), Demonstration((1,), (5,), (1,))]
    yield Parts(
        run_dir=tmp_path,
        policy=FakePolicy(),
        generator=FakeGenerator(),
        tools=FakeTools(),
        codec=CharCodec(),
        rubric=FakeRubric(),
        prompts=Stream(prompts),
        validation=prompts,
        dev=prompts,
        demonstrations=lambda: DemonstrationSampler(demonstrations, 1).next,
        start_s=1.0,
        wait=runner.run,
    )
    runner.close()
