"""`train.ares.entropy_stats`: windows stay in their turn, failed trajectories stay out, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.errors import InputError
from mega_agentrl.train.ares.entropy_stats import collect_entropy_stats
from mega_agentrl.types.records import StopReason
from tests.train.entropy_trees import path, steady, tree

NAN = float("nan")


def windows(*paths, trigger_ids=None):
    entropy_stats = collect_entropy_stats([tree("p", *paths)], trigger_ids)
    return [window_N.tolist() for window_N in entropy_stats.window_entropies]


def known(values):
    return {at: value for at, value in enumerate(values) if value == value}


def test_statistics_hold_windows_percentile_and_mean_of_each_trajectory():
    entropy_stats = collect_entropy_stats([tree("p", path(1, [9, 1, 2, 3, 4, 5]))], None)
    assert known(entropy_stats.window_entropies[0].tolist()) == {0: 2.5, 1: 3.5}
    # Filled up with the mean of the two: 2.5 3 3 3 3 3.5, place 4.75 of 0..5.
    assert entropy_stats.entropy_p95_B.tolist() == [pytest.approx(3.375)]
    assert entropy_stats.mean_entropy_B.tolist() == [4.0]
    assert entropy_stats.is_correct_B.tolist() == [True] and entropy_stats.prompt_ids == ("p",)
    counts = [entropy_stats.hwe_count_B(at).tolist() for at in (-1.0, 2.5, 3.0, 4.0)]
    assert counts == [[2], [2], [1], [0]]
    assert entropy_stats.hwe_count_B(None).tolist() == [0]


def test_a_window_stays_in_its_turn():
    apart = path(1, [1, 1, 1], [4] * 5)
    touching = path(1, [1, 1, 1], [4] * 5, touching=True)
    assert [known(one) for one in windows(apart, touching)] == [{4: 4.0}, {3: 4.0}]


def test_tool_tokens_are_in_no_window():
    loud, quiet = (path(1, steady(1), steady(2)) for _ in range(2))
    quiet.entropies = [value if value < 50 else 0.0 for value in quiet.entropies]
    both = collect_entropy_stats([tree("p", loud, quiet)], None)
    assert known(both.window_entropies[0].tolist()) == known(both.window_entropies[1].tolist())
    assert both.entropy_p95_B[0] == both.entropy_p95_B[1]
    assert both.mean_entropy_B.tolist() == [3.0, 3.0]


def test_only_triggers_start_windows_where_there_is_a_list():
    argmax = [5, 8, 5, 8, 8, 8, 8]
    plain, listed = (path(1, steady(3), argmax=argmax) for _ in range(2))
    (everywhere,), (behind_5,) = windows(plain), windows(listed, trigger_ids={5, 6})
    assert known(everywhere) == {0: 3.0, 1: 3.0, 2: 3.0} and known(behind_5) == {0: 3.0, 2: 3.0}
    entropy_stats = [collect_entropy_stats([tree("p", plain)], ids) for ids in (None, {5}, ())]
    percentiles = {float(one.entropy_p95_B[0]) for one in entropy_stats}
    assert len(percentiles) == 1, "the percentile is over all windows"
    assert [one.hwe_count_B(3.0).tolist() for one in entropy_stats] == [[3], [2], [0]]
    bare = path(1, steady(3), argmax=())
    assert len(windows(bare)) == 1
    with pytest.raises(InputError) as caught:
        windows(bare, trigger_ids={5})
    assert caught.value.name.startswith("number of argmax_ids")
    assert caught.value.got == 0


def test_failed_and_unscored_trajectories_are_left_out():
    good, bad = path(1, steady(1)), path(None, steady(5), stop_reason=StopReason.tool_failure)
    trees = [tree("a", bad, good), tree("b", bad, bad), tree("c", path(None, steady(2)), good)]
    entropy_stats = collect_entropy_stats(trees, None)
    assert entropy_stats.trajectory_ids == ("a/train-1/1", "c/train-1/1")
    assert entropy_stats.prompt_ids == ("a", "c")
    assert entropy_stats.hwe_count_B(2.0).tolist() == [1, 1]
    nothing = collect_entropy_stats([tree("b", bad)], None)
    assert nothing.trajectory_ids == () and nothing.hwe_count_B(1.0).tolist() == []


def test_a_trajectory_without_a_sampled_token_has_no_percentile():
    entropy_stats = collect_entropy_stats([tree("p", path(0), path(1, [1.0]))], None)
    assert entropy_stats.entropy_p95_B.isnan().tolist() == [True, False]
    assert entropy_stats.hwe_count_B(-1.0).tolist() == [0, 0]


lengths = st.lists(
    st.lists(st.lists(st.floats(0, 8, width=32), max_size=9), max_size=3), max_size=4
)


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, max_size=3))
def test_windows_are_means_of_four_in_one_turn_whatever_stands_beside(groups):
    trees = [
        tree(f"p{at}", *(path(1, *spoken) for spoken in group)) for at, group in enumerate(groups)
    ]
    entropy_stats = collect_entropy_stats(trees, None)
    everyone = [one for one in trees for one in one.trajectories]
    for one, window_N in zip(everyone, entropy_stats.window_entropies, strict=True):
        expected = [NAN] * len(one.token_ids)
        for turn in one.turns:
            for at in range(turn.start, turn.stop - 4):
                if one.loss_mask[at]:
                    expected[at] = sum(one.entropies[at + 1 : at + 5]) / 4
        assert known(window_N.tolist()) == pytest.approx(known(expected), rel=1e-5, abs=1e-6)


def test_unequal_lengths_are_refused():
    entropy_stats = collect_entropy_stats([tree("p", path(1, steady(1)))], None)
    with pytest.raises(InputError) as caught:
        replace(entropy_stats, prompt_ids=("p", "p"))
    assert caught.value.got["prompt_ids"] == 2


def test_windows_have_the_size_of_the_setting():
    trees = [tree("p", path(1, [9, 1, 2, 3, 4, 5]))]
    entropy_stats = collect_entropy_stats(trees, None, window=2)
    (window_N,) = entropy_stats.window_entropies
    assert window_N[:4].tolist() == [1.5, 2.5, 3.5, 4.5] and window_N[4:].isnan().all()
