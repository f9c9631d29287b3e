"""Means, calls to a reward and the table by hand; the plot shows every run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from mega_agentrl.errors import InputError
from mega_agentrl.report.compare.algorithms import (
    EvalCostPoint,
    RunCostCurve,
    algorithms_markdown,
    mean_curve,
    summarize_algorithms,
    tool_calls_to_reach,
    write_cost_plot,
)


def curve(name, seed, *marks):
    """marks: (calls, reward); ten tokens a call, success is half of the reward."""
    return RunCostCurve(
        algorithm=name,
        seed=seed,
        eval_points=tuple(
            EvalCostPoint(
                num_tokens=10 * calls, num_tool_calls=calls, reward=reward, success=reward / 2
            )
            for calls, reward in marks
        ),
    )


CURVES = [
    curve("GRPO", 1, (0, 0.2), (100, 0.3), (200, 0.5)),
    curve("GRPO", 2, (0, 0.2), (120, 0.5), (240, 0.7)),
    curve("ARPO", 1, (0, 0.2), (50, 0.5), (100, 0.7)),
    curve("ARPO", 2, (0, 0.2), (70, 0.5), (120, 0.9)),
    curve("flat", 1, (0, 0.2), (9, 0.2), (20, 0.3)),
]


def test_the_mean_curve_has_means_and_ranges_of_two_runs():
    _, middle, end = mean_curve(CURVES[:2])
    assert (middle.num_tool_calls, middle.num_tokens) == (110, 1100)
    assert (middle.reward, middle.min_reward, middle.max_reward) == (pytest.approx(0.4), 0.3, 0.5)
    assert (end.num_tool_calls, end.reward) == (220, pytest.approx(0.6))


def test_each_algorithm_has_means_deviations_and_costs():
    grpo, arpo, flat = summarize_algorithms(CURVES, baseline="GRPO")
    assert (grpo.algorithm, grpo.num_seeds, grpo.num_tool_calls) == ("GRPO", 2, 220)
    assert grpo.reward == pytest.approx(0.6)
    assert grpo.success == pytest.approx(0.3)
    assert grpo.reward_std == pytest.approx(0.1 * 2**0.5)
    assert grpo.tool_calls_to_baseline == pytest.approx(220)
    assert grpo.fraction_of_baseline_calls == pytest.approx(1.0)
    # 0.6 lies a third of the way from 0.5 at 60 calls to 0.8 at 110.
    assert arpo.tool_calls_to_baseline == pytest.approx(60 + 50 / 3)
    assert arpo.fraction_of_baseline_calls == pytest.approx((60 + 50 / 3) / 220)
    assert flat.tool_calls_to_baseline is flat.fraction_of_baseline_calls is None
    assert flat.reward_std is None


def test_the_order_is_that_of_the_first_runs():
    rows = summarize_algorithms(CURVES[::-1], baseline="GRPO")
    assert [row.algorithm for row in rows] == ["flat", "ARPO", "GRPO"]


def test_without_a_run_of_the_baseline_there_is_no_cost_to_reach_it():
    (row,) = summarize_algorithms(CURVES[2:3], baseline="GRPO")
    assert row.reward == 0.7
    assert row.tool_calls_to_baseline is row.fraction_of_baseline_calls is None


def test_a_reward_of_the_start_needs_no_calls():
    assert tool_calls_to_reach(mean_curve(CURVES[:1]), 0.1) == 0


def test_the_first_crossing_counts():
    marks = mean_curve([curve("x", 1, (0, 0.0), (10, 1.0), (20, 0.0), (30, 2.0))])
    assert tool_calls_to_reach(marks, 0.5) == 5
    assert tool_calls_to_reach(marks, 1.5) == pytest.approx(27.5)
    assert tool_calls_to_reach(marks, 2.5) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_reward_is_reached_later_or_never(rewards, first, second):
    marks = mean_curve([curve("x", 1, *enumerate(rewards))])
    low, high = (tool_calls_to_reach(marks, reward) for reward in sorted((first, second)))
    assert (low is None) <= (high is None)
    assert low is None or 0 <= low <= len(rewards) - 1
    assert high is None or low <= high
    assert (low is None) == (max(rewards) < min(first, second))


def test_runs_with_different_numbers_of_evaluations_are_refused():
    with pytest.raises(InputError) as caught:
        mean_curve([CURVES[0], curve("GRPO", 3, (0, 0.2))])
    assert caught.value.name == "evaluation points of GRPO"
    assert caught.value.got == "seed 1: 3, seed 3: 1"


def test_a_run_without_an_evaluation_is_refused():
    with pytest.raises(InputError) as caught:
        curve("GRPO", 4)
    assert caught.value.name == "evaluation points of GRPO, seed 4"


def test_the_table_has_a_row_of_each_algorithm():
    lines = algorithms_markdown(
        summarize_algorithms(CURVES, baseline="GRPO"), baseline="GRPO"
    ).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| GRPO | 2 | 0.600 ± 0.141 | 0.300 | 2,200 | 220 | 220 | 100% |"
    assert lines[3] == "| ARPO | 2 | 0.800 ± 0.141 | 0.400 | 1,100 | 110 | 77 | 35% |"
    assert lines[4] == "| flat | 1 | 0.300 | 0.150 | 200 | 20 | - | - |"


def test_the_plot_shows_every_run(tmp_path):
    whole, without = tmp_path / "new" / "whole.png", tmp_path / "without.png"
    write_cost_plot(whole, CURVES, baseline="GRPO", title="tool-QA")
    write_cost_plot(without, CURVES[:-1], baseline="GRPO", title="tool-QA")
    pixels = imread(whole)
    assert pixels.shape[1] > 2 * pixels.shape[0] > 800
    assert pixels[..., :3].std() > 0.01
    assert whole.read_bytes() != without.read_bytes()


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(InputError) as caught:
        write_cost_plot(tmp_path / "none.png", [], baseline="GRPO")
    assert caught.value.got == 0
