"""Evaluation: means, standard error, sources, greedy beside samples."""

from dataclasses import replace
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.sections.runtime import EvaluateConfig
from mega_agentrl.train.evaluate import (
    compute_eval_result,
    evaluate_validation_set,
    first_questions,
    pass_at_k,
    pass_at_k_metrics,
)
from tests.fakes import FakeRubric, make_prompt, make_scored_tree
from tests.through_json import through_json


def tree(name, source, *rewards, extra_info=None):
    """A question with answers of these rewards; None is a failed one."""
    made = make_scored_tree(*rewards)
    made.prompt = make_prompt(name, data_source=source, extra_info=extra_info or {})
    for one in made.trajectories:
        one.prompt = made.prompt
    return made


def test_means_and_errors_are_those_over_questions():
    trees = [tree("a", "easy", 1.0, 0.0), tree("b", "hard", 0.0, 0.0)]
    result = compute_eval_result(trees, num_samples=2)
    assert result.reward == result.success == 0.25
    assert result.reward_by_source == {"easy": 0.5, "hard": 0.0}
    # question means .5 and 0: standard deviation .35355, over sqrt(2)
    assert result.reward_se == pytest.approx(0.25)


def test_rows_that_repeat_a_question_are_its_samples():
    """Two questions, each in two rows that are answered once, as in AIME-2024."""
    trees = [tree("a", "m", 1.0), tree("b", "m", 0.0), tree("a", "m", 0.0), tree("b", "m", 0.0)]
    result = compute_eval_result(trees, num_samples=1)
    assert (result.num_questions, result.num_samples) == (2, 2)
    assert result.success == 0.25
    assert result.reward_se == pytest.approx(0.25)  # of the questions' means .5 and 0
    assert result.pass_at_k["pass@1"] == 0.25
    assert result.pass_at_k["pass@2"] == 0.5
    assert result.question_means["m"] == {"a": (0.5, 0.5), "b": (0.0, 0.0)}


def test_a_number_of_questions_takes_all_rows_of_each():
    prompts = [make_prompt(name) for name in ("a", "a", "b", "c", "a", "b")]
    chosen = [prompt.prompt_id for prompt in first_questions(prompts, 2)]
    assert chosen == ["a", "a", "b", "a", "b"]
    assert first_questions(prompts, 0) == prompts


def test_failed_trajectories_do_not_count():
    trees = [tree("a", "easy", 1.0, None), tree("b", "easy", None, None)]
    result = compute_eval_result(trees, num_samples=2)
    assert result.reward == 1.0
    assert result.question_means == {"": {"a": (1.0, 1.0)}, "easy": {"a": (1.0, 1.0)}}


def test_a_warning_of_an_evaluation_does_not_speak_of_training(components, config, caplog):
    class Failing(FakeRubric):
        def score(self, trajectory):
            trajectory.reward_error = "reward function mine: returned None"

    components.rubric = Failing()
    evaluate_validation_set(components, config)
    assert "returned None" in caplog.text and "in no mean of the evaluation" in caplog.text
    assert "trained on" not in caplog.text


def test_questions_of_one_turn_and_of_several_are_told_apart():
    single, several = {"turns": "single_turn"}, {"turns": "multi_turn"}
    trees = [
        tree("a", "bfcl", 1.0, 0.0, extra_info=single),
        tree("b", "bfcl", 0.0, 0.0, extra_info=several),
        tree("c", "bfcl", 1.0, 1.0, extra_info=single),
        tree("d", "other", 0.0, 0.0),
    ]
    result = compute_eval_result(trees, num_samples=2)
    assert result.reward == result.success == 3 / 8
    assert result.success_by_source == {
        "bfcl": 0.5,
        "bfcl/multi_turn": 0.0,
        "bfcl/single_turn": 0.75,
        "other": 0.0,
    }
    assert result.to_metrics("sampled")["sampled/success/bfcl/single_turn"] == 0.75


def test_pass_at_k_is_over_questions_and_by_source():
    trees = [tree("a", "easy", 1.0, 0.0, 0.0, 0.0), tree("b", "hard", 0.0, 0.0, 0.0, 0.0)]
    metrics = compute_eval_result(trees, num_samples=4).to_metrics("sampled")
    assert metrics["sampled/pass@2"] == 0.25  # 3 of the 6 pairs of the first question
    assert metrics["sampled/pass@4"] == 0.5
    assert metrics["sampled/pass@4/easy"] == 1.0 and metrics["sampled/pass@4/hard"] == 0.0
    assert metrics["sampled/mean@4"] == 0.125 and metrics["sampled/mean@4/easy"] == 0.25
    once = compute_eval_result([tree("a", "easy", 1.0)], num_samples=1).to_metrics("greedy")
    assert not any("@" in name for name in once)


def test_parts_of_the_reward_are_not_taken_for_data_sources():
    one = tree("a", "gsm8k", 1.0)
    (row,) = one.trajectories
    row.score = replace(row.score, parts={"arpo": 0.75, "gsm8k": 0.25})
    metrics = compute_eval_result([one], num_samples=1).to_metrics("sampled")
    assert metrics["sampled/reward/gsm8k"] == 1.0
    assert metrics["sampled/rollout/reward/gsm8k"] == 0.25


def test_a_reward_models_part_is_evaluated_as_well(components, config):
    class Model:
        def compute_scores(self, batch):
            return batch.length_B.float()

    class Judged(FakeRubric):
        def needs_reward_model(self, prompt):
            return True

        def add_model_score(self, trajectory, value):
            return replace(trajectory.score, value=value)

    components.rubric, components.reward_model = Judged(), Model()
    result = evaluate_validation_set(components, config)
    lengths = result.sampled.metrics["rollout/response_tokens_mean"]
    assert result.sampled.reward == pytest.approx(lengths)


def test_validation_takes_the_first_questions_and_never_branches(components, config):
    config.evaluate = EvaluateConfig(num_questions=2, num_samples=3, greedy=True)
    result = evaluate_validation_set(components, config)
    assert result.sampled.num_questions == 2
    assert result.sampled.metrics["rollout/num_trajectories"] == 6
    assert result.sampled.metrics["rollout/forks_per_prompt"] == 0
    assert result.greedy is not None
    assert result.greedy.metrics["rollout/num_trajectories"] == 2
    assert {request.temperature for request in components.generator.requests} == {0.0, 1.0}
    metrics = result.to_metrics()
    assert metrics["sampled/reward"] == result.sampled.reward
    assert "greedy/success/fake" in metrics


def test_zero_questions_means_all_of_them(components, config):
    assert evaluate_validation_set(components, config).sampled.num_questions == 6


@pytest.mark.parametrize("greedy", [False, True])
def test_a_validation_result_survives_json(components, config, greedy):
    config.evaluate = EvaluateConfig(greedy=greedy)
    result = evaluate_validation_set(components, config)
    assert through_json(result) == result
    assert (result.greedy is not None) == greedy


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_mean_over_all_ways_to_draw_k(right, k):
    k = min(k, len(right))
    drawn = [float(any(some)) for some in combinations(right, k)]
    assert pass_at_k(sum(right), len(right), k) == pytest.approx(fmean(drawn))


def test_pass_at_k_metrics_are_means_over_questions_at_powers_of_two():
    right = [[True, False, False, False, False], [True] * 5]
    found = pass_at_k_metrics(right, 5)
    assert list(found) == ["pass@1", "pass@2", "pass@4", "mean@5"]
    # 1 of 5: 4 of the 10 pairs, 4 of the 5 fours.
    assert found["pass@2"] == pytest.approx((0.4 + 1) / 2)
    assert found["pass@4"] == pytest.approx((0.8 + 1) / 2)
    assert found["mean@5"] == found["pass@1"] == pytest.approx(0.6)


def test_questions_with_too_few_answers_are_left_out_of_pass_at_k():
    found = pass_at_k_metrics([[True], [False, False]], 2)
    assert found == {"pass@1": 0.5, "pass@2": 0.0, "mean@2": 0.5}
    assert pass_at_k_metrics([[True]], 1) == {}
    assert pass_at_k_metrics([[]], 4) == {}


def test_answers_that_failed_are_counted_also_for_a_source_without_any_score():
    trees = [tree("a", "easy", 1.0, None), tree("b", "hard", None, None)]
    result = through_json(compute_eval_result(trees, num_samples=2))
    assert result.success_by_source == {"easy": 1.0}
    metrics = result.to_metrics("sampled")
    names = ("", "/easy", "/hard")
    assert [metrics[f"sampled/num_answers{name}"] for name in names] == [4, 2, 2]
    assert [metrics[f"sampled/num_scored{name}"] for name in names] == [1, 1, 0]
    assert result.failures.first_reason == "aborted"
