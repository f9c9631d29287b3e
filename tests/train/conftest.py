"""A whole run out of fakes: every part of the loop without Ray, Megatron or vLLM."""

import asyncio
import os
from dataclasses import replace

import pytest

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.config.sections.policy import OptimConfig, SftConfig
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.config.sections.runtime import EngineConfig, EvaluateConfig, ReportConfig
from mega_agentrl.data.sft_dataset import Demonstration, DemonstrationSampler
from mega_agentrl.train import run_logger
from mega_agentrl.types.batch import UpdateStats
from mega_agentrl.types.components import Components
from tests.fakes import CharCodec, FakeGenerator, FakeRubric, FakeTools, make_prompt
from tests.train.file_policy import FilePolicy
from tests.train_batches import update_scores


class FakePolicy(FilePolicy):
    """Records its calls in order; its log-probs differ by `gap` from the engine's."""

    gap = 0.25

    def __init__(self):
        super().__init__()
        self.calls = []

    def start_save(self, folder):
        self.calls.append(f"save {folder.name.partition('.')[0]}")
        return super().start_save(folder)

    def compute_log_probs(self, batch):
        self.calls.append("compute_log_probs")
        return batch.with_fields(
            old_logp_BT=batch.rollout_logp_BT + self.gap, entropy_BT=batch.rollout_entropy_BT
        )

    def update(self, batch, kl_weight_BT=None, has_signal_B=None):
        assert batch.advantage_BT is not None
        self.calls.append("update")
        scores = update_scores(batch, self.gap)
        return replace(self._stats(int(batch.mask_BT.sum())), scores=scores)

    def sft_step(self, batch):
        self.calls.append("sft_step")
        return self._stats(int(batch.mask_BT.sum()))

    def _stats(self, num_tokens):
        return UpdateStats(
            loss=0.5,
            grad_norm=1.0,
            learning_rate=0.1,
            num_tokens=num_tokens,
            num_skipped_steps=0,
            metrics={"clipfrac": 0.0},
        )

    def reset_optimizer(self):
        self.calls.append("reset_optimizer")

    def sync_weights(self, generator, version):
        self.calls.append(f"sync {version}")
        generator.version = version
        return {"total_s": 0.1}

    def start_profile(self):
        self.calls.append("start profile")

    def stop_profile(self, file):
        self.calls.append(f"stop profile {file.name}")

    def export_hf(self, folder):
        self.calls.append("export_hf")


class Stream:
    """The prompts in order, over and over."""

    def __init__(self, prompts):
        self.prompts, self.at = prompts, 0

    def next_prompts(self, num_prompts):
        taken = [self.prompts[(self.at + i) % len(self.prompts)] for i in range(num_prompts)]
        self.at += num_prompts
        return taken

    def ack(self, prompts):
        pass

    @property
    def num_epochs(self):
        return self.at / len(self.prompts)

    def record_accuracies(self, accuracies):
        self.accuracies = accuracies

    def nack(self, prompts):
        assert not prompts, "this stream only goes forward"

    def state_dict(self):
        return {"at": self.at}


@pytest.fixture
def config(tmp_path):
    return TrainConfig(
        run_dir=str(tmp_path),
        total_steps=2,
        engine=EngineConfig(max_model_len=128),
        rollout=RolloutConfig(group_size=4, max_response_tokens=60, max_turns=4),
        data=DataConfig(prompts_per_step=3),
        optim=OptimConfig(num_minibatches=2),
        sft=SftConfig(batch_size=2),
        evaluate=EvaluateConfig(num_samples=2),
        report=ReportConfig(trackers=[]),
    )


@pytest.fixture
def bare_runs(monkeypatch):
    """Runs without page and picture, which take longer than the rest, and that no disk slows."""
    monkeypatch.setattr(run_logger, "write_report", lambda folder: folder)
    monkeypatch.setattr(run_logger, "write_reward_curve", lambda *args: None)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def components(tmp_path):
    prompts = [make_prompt(f"p{i}", f"Q{i}") for i in range(6)]
    runner = asyncio.Runner()
    yield Components(
        run_dir=tmp_path,
        policy=FakePolicy(),
        generator=FakeGenerator(),
        tools=FakeTools(),
        codec=CharCodec(),
        rubric=FakeRubric(),
        prompt_source=Stream(prompts),
        validation_prompts=prompts,
        dev_prompts=prompts,
        make_demonstration_batches=None,
        startup_s=1.0,
        run_coroutine=runner.run,
    )
    runner.close()


@pytest.fixture
def demonstrations(components):
    """Demonstrations, so that a run with `sft.max_steps` has a warm start."""
    rows = [Demonstration((1, 2), (3, 4), (1, 1)), Demonstration((1,), (5,), (1,))]
    components.make_demonstration_batches = lambda: DemonstrationSampler(rows, 1).next_batch
