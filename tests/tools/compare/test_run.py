"""A run of the comparison out of fakes: marks, budget, and going on where it was killed."""

import asyncio
import json
from dataclasses import asdict, replace

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
from mega_agentrl.data.sampler import PromptSampler
from mega_agentrl.data.sft import Demonstration, DemonstrationSampler
from mega_agentrl.types.batch import UpdateStats
from mega_agentrl.types.parts import Parts
from mega_agentrl.types.records import Score
from tests.fakes import CharCodec, FakeGenerator, FakeRubric, FakeTools, make_prompt, unit
from tests.train.file_policy import FilePolicy
from tools.compare.budget import Budget
from tools.compare.run import Bench, evaluate_warm, run_once, warm_up

PROMPTS = [make_prompt(f"p{number}", f"Q{number}") for number in range(10)]
BUDGET = Budget(num_tokens=3000, num_steps=None, num_marks=4)
SETTINGS = {"algo": {"kl_coef": 0.0}, "seed": 1}


class Learner(FilePolicy):
    """Learns from each batch; dies where it is told to, before that update counts."""

    def __init__(self):
        super().__init__()
        self.verbs = []
        self.served = 0.0
        self.dies_at = None

    def add_logprobs(self, batch):
        return batch.with_fields(
            old_logp_BT=batch.rollout_logp_BT, entropy_BT=batch.rollout_entropy_BT
        )

    def update(self, batch, kl_weight_BT=None):
        self.verbs.append("update")
        if self.verbs.count("update") == self.dies_at:
            raise KeyboardInterrupt
        return self._learn(batch, 0.01)

    def supervise(self, batch):
        return self._learn(batch, 0.1)

    def _learn(self, batch, by):
        self.weight += by * int(batch.response_BT.sum() % 7 + 1)
        return UpdateStats(
            loss=0.0, grad_norm=1.0, learning_rate=0.1, num_tokens=1, num_skipped=0, metrics={}
        )

    def set_objective(self, algo, temperature):
        self.verbs.append(f"objective at {self.weight:.2f}")

    def resume(self, folder):
        self.verbs.append(f"resume {folder.name}")
        return super().resume(folder)

    def reset_optimizer(self):
        self.verbs.append("reset")

    def send_weights(self, generator, version):
        self.served = self.weight
        generator.version = version
        return {}


class Rubric(FakeRubric):
    """More for what better weights said."""

    def __init__(self, policy):
        self.policy = policy

    def score(self, trajectory):
        value = unit(trajectory.response_text) + self.policy.served
        return Score(value=value, correct=False, f1=0.0, answer="", reason="")


@pytest.fixture
def base(tmp_path):
    return TrainConfig(
        run_dir=str(tmp_path),
        total_steps=9,
        engine=EngineConfig(max_model_len=128),
        rollout=RolloutConfig(num_trajectories=4, max_response_tokens=60, max_turns=4),
        data=DataConfig(prompts_per_step=3),
        sft=SftConfig(max_steps=4, batch_size=2),
        evaluate=EvaluateConfig(num_questions=3),
        report=ReportConfig(trackers=[]),
    )


@pytest.fixture
def make_bench(tmp_path, base):
    """`make_bench()`: new processes over the same folders, as after a restart."""
    runner = asyncio.Runner()

    def make():
        policy = Learner()
        demonstrations = [Demonstration((1, 2), (3, 4), (1, 1)), Demonstration((1,), (5,), (1,))]
        parts = Parts(
            run_dir=tmp_path,
            policy=policy,
            generator=FakeGenerator(),
            tools=FakeTools(),
            codec=CharCodec(),
            rubric=Rubric(policy),
            prompts=PromptSampler(PROMPTS, 1),
            validation=PROMPTS[:3],
            dev=PROMPTS[:2],
            demonstrations=lambda: DemonstrationSampler(demonstrations, 1).next,
            start_s=0.0,
            wait=runner.run,
        )
        warm = warm_up(parts, base, SETTINGS, tmp_path / "warm")
        before = evaluate_warm(parts, base, warm, tmp_path / "warm")
        policy.verbs.clear()
        return Bench(parts=parts, base=base, warm=warm, before=before)

    yield make
    runner.close()


def config_of(base, name, seed=1):
    return replace(base, run_dir=f"{base.run_dir}/{name}", seed=seed)


def steps_of(config):
    with open(f"{config.run_dir}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    return [line["step"] for line in lines if line["stage"] == "rl"]


def test_marks_come_at_equal_shares_and_the_last_at_the_end(make_bench, base):
    bench, config = make_bench(), config_of(base, "a")
    marks = run_once(bench, config, SETTINGS, BUDGET, 2)
    assert len(marks) == 5
    assert marks[0] == bench.before
    tokens = [mark.num_tokens for mark in marks]
    # A step is at most 12 trajectories of 60 tokens, so each mark is the first behind its share.
    for number, spent in enumerate(tokens):
        assert 750 * number <= spent < 750 * number + 720
    calls = [mark.num_calls for mark in marks]
    assert calls == sorted(calls)
    assert 0 < calls[-1] < tokens[-1]
    # What was learned is what was measured.
    assert [mark.reward for mark in marks] == sorted(mark.reward for mark in marks)
    assert steps_of(config) == list(range(1, len(steps_of(config)) + 1))


@pytest.mark.parametrize("dies_at", [1, 3, 4, 5])
def test_a_killed_run_ends_like_one_that_was_not(dies_at, make_bench, base):
    whole = make_bench()
    expected = run_once(whole, config_of(base, "whole"), SETTINGS, BUDGET, 2)
    config = config_of(base, "killed")
    killed = make_bench()
    killed.parts.policy.dies_at = dies_at
    with pytest.raises(KeyboardInterrupt):
        run_once(killed, config, SETTINGS, BUDGET, 2)
    resumed = make_bench()
    assert run_once(resumed, config, SETTINGS, BUDGET, 2) == expected
    assert resumed.parts.policy.weight == whole.parts.policy.weight
    assert steps_of(config) == steps_of(config_of(base, "whole"))
    # Saved every two steps: what was killed in step 4 goes on after step 2.
    kept = (dies_at - 1) // 2 * 2
    first = ["resume step-000000", f"objective at {read_weight(resumed):.2f}"]
    again = [f"resume step-{kept:06d}"] if kept else []
    assert resumed.parts.policy.verbs[: 2 + len(again)] == first + again
    assert resumed.parts.policy.verbs.count("update") == len(steps_of(config)) - kept


def read_weight(bench):
    policy = FilePolicy()
    policy.resume(bench.warm)
    return policy.weight


def test_runs_of_one_process_do_not_see_each_other(make_bench, base):
    bench = make_bench()
    first = run_once(bench, config_of(base, "a"), SETTINGS, BUDGET, 2)
    other = run_once(bench, config_of(base, "b", seed=2), SETTINGS, BUDGET, 2)
    again = run_once(bench, config_of(base, "c"), SETTINGS, BUDGET, 2)
    assert first == again != other
    assert first[0] == other[0]


def test_a_finished_run_is_read(make_bench, base):
    config = config_of(base, "a")
    marks = run_once(make_bench(), config, SETTINGS, BUDGET, 2)
    bench = make_bench()
    assert run_once(bench, config, SETTINGS, BUDGET, 2) == marks
    assert bench.parts.policy.verbs == []


def test_other_settings_in_the_same_folder_are_refused(make_bench, base):
    config, bench = config_of(base, "a"), make_bench()
    run_once(bench, config, SETTINGS, replace(BUDGET, num_tokens=100), 2)
    with pytest.raises(ValueError, match=r"/a: got a run with other values of algo\.kl_coef, seed"):
        run_once(bench, config, {"algo": {"kl_coef": 0.1}, "seed": 2}, BUDGET, 2)


def test_the_warm_start_is_made_and_measured_once(make_bench, base, tmp_path):
    bench = make_bench()
    lines = (tmp_path / "warm" / "metrics.jsonl").read_text().splitlines()
    again = make_bench()
    assert (again.warm, again.before) == (bench.warm, bench.before)
    assert (tmp_path / "warm" / "metrics.jsonl").read_text().splitlines() == lines
    assert len(lines) == 4
    assert read_weight(bench) > 0
    assert json.loads((tmp_path / "warm" / "evaluation.json").read_text()) == asdict(bench.before)
    assert bench.before.reward > read_weight(bench)
    assert (bench.before.num_tokens, bench.before.num_calls) == (0, 0)


def test_a_budget_of_steps(make_bench, base):
    budget = Budget(num_tokens=1, num_steps=2, num_marks=5)
    marks = run_once(make_bench(), config_of(base, "a"), SETTINGS, budget, 10)
    # Two steps for five marks: those of a step are the same.
    assert len(marks) == 6
    assert len(set(marks[1:3])) == len(set(marks[3:])) == 1
    assert steps_of(config_of(base, "a")) == [1, 2]
