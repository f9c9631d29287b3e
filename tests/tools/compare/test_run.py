"""A run of the comparison with fakes: evaluations, budget, and continuing after a kill."""

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.config.sections.policy import SftConfig
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.config.sections.runtime import EngineConfig, EvaluateConfig, ReportConfig
from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.data.sft_dataset import Demonstration, DemonstrationSampler
from mega_agentrl.errors import InputError
from mega_agentrl.types.batch import UpdateStats
from mega_agentrl.types.components import Components
from mega_agentrl.types.records import Score
from tests.fakes import CharCodec, FakeGenerator, FakeRubric, FakeTools, make_prompt, unit
from tests.train.file_policy import FilePolicy
from tests.train.interruptible_run import LearningCritic, Moments
from tests.train_batches import update_scores
from tools.compare.budget import Budget
from tools.compare.run import (
    ComparisonSetup,
    evaluate_warm,
    make_warm_start,
    read_result,
    run_once,
)

pytestmark = pytest.mark.extended

PROMPTS = [make_prompt(f"p{number}", f"Q{number}") for number in range(10)]
BUDGET = Budget(num_tokens=3000, num_steps=None, num_evaluations=4)
SETTINGS = {"algo": {"kl_coef": 0.0}, "seed": 1}


class Learner(FilePolicy):
    """Learns from each batch; dies where it is told to, before that update counts."""

    def __init__(self):
        super().__init__()
        self.verbs = []
        self.served = 0.0
        self.dies_at = self.runs_dry_at = None

    def compute_log_probs(self, batch):
        return batch.with_fields(
            old_logp_BT=batch.rollout_logp_BT, entropy_BT=batch.rollout_entropy_BT
        )

    def update(self, batch, kl_weight_BT=None, has_signal_B=None):
        self.verbs.append("update")
        if self.verbs.count("update") == self.dies_at:
            raise KeyboardInterrupt
        if self.verbs.count("update") == self.runs_dry_at:
            raise ValueError("no group is left")
        return replace(self._learn(batch, 0.01), scores=update_scores(batch))

    def sft_step(self, batch):
        return self._learn(batch, 0.1)

    def _learn(self, batch, by):
        self.weight += by * int(batch.response_BT.sum() % 7 + 1)
        return UpdateStats(
            loss=0.0,
            grad_norm=1.0,
            learning_rate=0.1,
            num_tokens=1,
            num_skipped_steps=0,
            metrics={},
        )

    def set_objective(self, algo, temperature):
        self.verbs.append(f"objective at {self.weight:.2f}")

    def load_checkpoint(self, folder):
        self.verbs.append(f"load {folder.name}")
        return super().load_checkpoint(folder)

    def reset_optimizer(self):
        self.verbs.append("reset")

    def sync_weights(self, generator, version):
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
        rollout=RolloutConfig(group_size=4, max_response_tokens=60, max_turns=4),
        data=DataConfig(prompts_per_step=3),
        sft=SftConfig(max_steps=4, batch_size=2),
        evaluate=EvaluateConfig(num_questions=3),
        report=ReportConfig(trackers=[]),
    )


@pytest.fixture
def make_setup(tmp_path, base):
    """`make_setup()`: new processes over the same folders, as after a restart."""
    runner = asyncio.Runner()

    def make(critic=None):
        policy = Learner()
        demonstrations = [Demonstration((1, 2), (3, 4), (1, 1)), Demonstration((1,), (5,), (1,))]
        parts = Components(
            run_dir=tmp_path,
            policy=policy,
            generator=FakeGenerator(),
            tools=FakeTools(),
            codec=CharCodec(),
            rubric=Rubric(policy),
            prompt_source=PromptSampler(PROMPTS, 1),
            validation_prompts=PROMPTS[:3],
            dev_prompts=PROMPTS[:2],
            make_demonstration_batches=lambda: DemonstrationSampler(demonstrations, 1).next_batch,
            startup_s=0.0,
            run_coroutine=runner.run,
            critic=critic,
        )
        warm = make_warm_start(parts, base, SETTINGS, tmp_path / "warm")
        before = evaluate_warm(parts, base, warm, tmp_path / "warm" / "validation.json")
        policy.verbs.clear()
        return ComparisonSetup(
            components=parts, base_config=base, warm_start_folder=warm, initial_evaluation=before
        )

    yield make
    runner.close()


def config_of(base, name, seed=1):
    return replace(base, run_dir=f"{base.run_dir}/{name}", seed=seed)


def steps_of(config):
    with open(f"{config.run_dir}/metrics.jsonl") as file:
        lines = [json.loads(line) for line in file]
    return [line["step"] for line in lines if line["stage"] == "rl"]


def test_evaluations_come_at_equal_fractions_and_the_last_at_the_end(make_setup, base):
    setup, config = make_setup(), config_of(base, "a")
    evaluations = run_once(setup, config, SETTINGS, BUDGET, 2).evaluations
    assert len(evaluations) == 5
    assert evaluations[0] == setup.initial_evaluation
    tokens = [evaluation.num_tokens for evaluation in evaluations]
    # A step has at most 12 trajectories of 60 tokens, so evaluations follow their share closely.
    for number, spent in enumerate(tokens):
        assert 750 * number <= spent < 750 * number + 720
    calls = [evaluation.num_tool_calls for evaluation in evaluations]
    assert calls == sorted(calls)
    assert 0 < calls[-1] < tokens[-1]
    # What was learned is what was measured.
    assert [evaluation.reward for evaluation in evaluations] == sorted(
        evaluation.reward for evaluation in evaluations
    )
    assert steps_of(config) == list(range(1, len(steps_of(config)) + 1))


@pytest.mark.parametrize("dies_at", [1, 3, 4, 5])
def test_a_killed_run_ends_like_one_that_was_not(dies_at, make_setup, base):
    whole = make_setup()
    expected = run_once(whole, config_of(base, "whole"), SETTINGS, BUDGET, 2)
    config = config_of(base, "killed")
    killed = make_setup()
    killed.components.policy.dies_at = dies_at
    with pytest.raises(KeyboardInterrupt):
        run_once(killed, config, SETTINGS, BUDGET, 2)
    resumed = make_setup()
    assert run_once(resumed, config, SETTINGS, BUDGET, 2) == expected
    assert resumed.components.policy.weight == whole.components.policy.weight
    assert steps_of(config) == steps_of(config_of(base, "whole"))
    # Saved every two steps: what was killed in step 4 goes on after step 2.
    last_saved = (dies_at - 1) // 2 * 2
    first = ["load step-000000", f"objective at {read_weight(resumed):.2f}"]
    again = [f"load step-{last_saved:06d}"] if last_saved else []
    assert resumed.components.policy.verbs[: 2 + len(again)] == first + again
    assert resumed.components.policy.verbs.count("update") == len(steps_of(config)) - last_saved


def test_a_critic_starts_anew_in_each_run_and_goes_on_in_a_killed_one(make_setup, base):
    base = replace(base, algo=AlgoConfig(advantage="gae"))
    whole = make_setup(LearningCritic(Moments()))
    critic = whole.components.critic
    expected = run_once(whole, config_of(base, "whole"), SETTINGS, BUDGET, 2)
    learned = critic.weight
    assert run_once(whole, config_of(base, "again"), SETTINGS, BUDGET, 2) == expected
    assert critic.weight == learned != LearningCritic(Moments()).weight
    killed, config = make_setup(LearningCritic(Moments())), config_of(base, "killed")
    killed.components.policy.dies_at = 4
    with pytest.raises(KeyboardInterrupt):
        run_once(killed, config, SETTINGS, BUDGET, 2)
    resumed = make_setup(LearningCritic(Moments()))
    assert run_once(resumed, config, SETTINGS, BUDGET, 2) == expected
    assert resumed.components.critic.weight == learned


def read_weight(setup):
    policy = FilePolicy()
    policy.load_checkpoint(setup.warm_start_folder)
    return policy.weight


def test_runs_of_one_process_do_not_see_each_other(make_setup, base):
    setup = make_setup()
    first = run_once(setup, config_of(base, "a"), SETTINGS, BUDGET, 2)
    other = run_once(setup, config_of(base, "b", seed=2), SETTINGS, BUDGET, 2)
    again = run_once(setup, config_of(base, "c"), SETTINGS, BUDGET, 2)
    assert first == again != other
    assert first.evaluations[0] == other.evaluations[0]


def test_a_finished_run_is_read(make_setup, base):
    config = config_of(base, "a")
    assert read_result(Path(config.run_dir), SETTINGS) is None
    finished = run_once(make_setup(), config, SETTINGS, BUDGET, 2)
    setup = make_setup()
    assert run_once(setup, config, SETTINGS, BUDGET, 2) == finished
    assert read_result(Path(config.run_dir), SETTINGS) == finished
    assert setup.components.policy.verbs == []


def test_a_run_that_cannot_go_on_ends_with_its_last_weights(make_setup, base):
    setup, config = make_setup(), config_of(base, "a")
    setup.components.policy.runs_dry_at = 2
    finished = run_once(setup, config, SETTINGS, BUDGET, 2)
    assert finished.stop_reason == "no group is left"
    assert len(finished.evaluations) == 5
    assert len(set(finished.evaluations[-3:])) == 1 < len(set(finished.evaluations))
    assert finished.evaluations[-1].reward > setup.initial_evaluation.reward
    assert read_result(Path(config.run_dir), SETTINGS) == finished


def test_other_settings_in_the_same_folder_are_refused(make_setup, base):
    config, setup = config_of(base, "a"), make_setup()
    run_once(setup, config, SETTINGS, replace(BUDGET, num_tokens=100), 2)
    with pytest.raises(InputError) as caught:
        run_once(setup, config, {"algo": {"kl_coef": 0.1}, "seed": 2}, BUDGET, 2)
    assert caught.value.name == config.run_dir
    assert caught.value.got == "a run with other values of algo.kl_coef, seed"


def test_the_warm_start_is_made_and_evaluated_once(make_setup, base, tmp_path):
    setup = make_setup()
    lines = (tmp_path / "warm" / "metrics.jsonl").read_text().splitlines()
    again = make_setup()
    assert (again.warm_start_folder, again.initial_evaluation) == (
        setup.warm_start_folder,
        setup.initial_evaluation,
    )
    assert (tmp_path / "warm" / "metrics.jsonl").read_text().splitlines() == lines
    assert len(lines) == 4
    assert read_weight(setup) > 0
    assert json.loads((tmp_path / "warm" / "validation.json").read_text()) == asdict(
        setup.initial_evaluation
    )
    assert setup.initial_evaluation.reward > read_weight(setup)
    assert (setup.initial_evaluation.num_tokens, setup.initial_evaluation.num_tool_calls) == (0, 0)


def test_a_budget_of_steps_is_not_exceeded_for_more_evaluations(make_setup, base):
    budget = Budget(num_tokens=1, num_steps=2, num_evaluations=5)
    evaluations = run_once(make_setup(), config_of(base, "a"), SETTINGS, budget, 10).evaluations
    # Two steps for five evaluations: those of a step are the same.
    assert len(evaluations) == 6
    assert len(set(evaluations[1:3])) == len(set(evaluations[3:])) == 1
    assert steps_of(config_of(base, "a")) == [1, 2]
