"""Which charts a log gets."""

from __future__ import annotations

import json
import math
import re

import pytest

from mega_agentrl.report.metrics_file import parse_metrics
from mega_agentrl.report.page.chart_groups import (
    MAX_OTHER_CHARTS,
    MAX_SERIES,
    MAX_TOOLS,
    chart_groups,
)
from mega_agentrl.report.page.summary_tiles import summary_tiles
from mega_agentrl.report.page.svg_charts import chart_data, render_figure, render_svg


def log_of(*lines):
    return parse_metrics(json.dumps(line) for line in lines)


def rl(step=1, **values):
    return {"stage": "rl", "step": step, **values}


def charts(log):
    return {chart.title: chart for group in chart_groups(log) for chart in group.charts}


def axis_labels(plot):
    """The numbers beside the value axis of a drawn chart."""
    return [float(text) for text in re.findall(r'class="y">([-0-9.e]+)</text>', plot)]


def test_reward_with_its_mean_and_the_evaluations():
    log = log_of(
        {"stage": "held_out_before", "step": 0, "sampled/reward": 0.1, "greedy/reward": 0.2},
        rl(1, **{"rollout/reward_unfiltered": 1.0, "rollout/reward_mean": 7.0}),
        rl(2, **{"rollout/reward_unfiltered": 3.0, "rollout/reward_mean": 7.0}),
        {"stage": "held_out_after", "step": 2, "sampled/reward": 0.9},
    )
    steps, mean, held_out, greedy = charts(log)["Reward"].series
    assert steps.points == [(1, 1.0), (2, 3.0)]
    assert mean.points == [(1, 1.0), (2, 2.0)]
    assert held_out.points == [(0, 0.1), (2, 0.9)]
    assert greedy.points == [(0, 0.2)]
    assert "Success" not in charts(log)


def test_the_reward_after_filtering_is_shown_if_there_is_no_other():
    assert charts(log_of(rl(**{"rollout/reward_mean": 7.0})))["Reward"].series[0].points == [(1, 7)]


def test_each_part_of_the_reward_has_a_scale_of_its_own():
    """On a common axis a part of 0.01 would be a flat line below one of 100."""
    log = log_of(
        rl(1, **{"reward/big": 90.0, "reward/small": 0.01, "reward/small/length": 7.0}),
        rl(2, **{"reward/big": 100.0, "reward/small": 0.02, "reward/failed_fraction": 0.5}),
    )
    (parts,) = [group for group in chart_groups(log) if group.has_small_charts]
    points = {chart.title: [line.points for line in chart.series] for chart in parts.charts}
    assert points == {
        "big": [[(1, 90.0), (2, 100.0)]],
        "small": [[(1, 0.01), (2, 0.02)]],
        "small/length": [[(1, 7.0)]],
    }
    tops = {chart.title: max(axis_labels(render_svg(chart))) for chart in parts.charts}
    assert tops["big"] > 50 and tops["small"] < 0.05


@pytest.mark.parametrize(
    ("title", "metrics", "labels"),
    [
        ("How trajectories end", {"rollout/stop/eos": 1.0, "rollout/stop/length": 0.0}, ["eos"]),
        ("Engine against trainer", {"mismatch/logp_max_abs": 1e-6}, ["logp_max_abs"]),
        ("Engine against trainer: probabilities", {"mismatch/prob_std_abs": 1e-7}, ["std_abs"]),
        ("Per bucket: alpha", {"ares/easy/alpha": 1.0, "ares/hard/alpha": 2.0}, ["easy", "hard"]),
        (
            "Clipped tokens",
            {"actor/clipfrac": 0.0, "actor/clipfrac_lower": 0.0},
            ["clipfrac", "clipfrac_lower"],
        ),
        (
            "Throughput",
            {"perf/tokens_per_s": 52.0, "perf/unique_tokens_per_s": 36.0},
            ["tokens_per_s", "unique_tokens_per_s"],
        ),
        ("Token ratio of the trees", {"tree/token_ratio": 1.8}, ["token_ratio"]),
        ("Balance of the data ranks", {"actor/load_imbalance": 1.1}, ["load_imbalance"]),
        ("Outcomes: python", {"rollout/tool/python/num_ok": 3.0}, ["ok"]),
        ("Seconds of a call: python", {"rollout/tool/python/latency_p99_s": 3.0}, ["p99"]),
        (
            "Time of a step by phase",
            {"time/rollout_s": 3.0, "time/update_s": 1.0},
            ["rollout", "update"],
        ),
        (
            "Failed trajectories",
            {"reward/failed_fraction": 0.1, "rollout/failed_fraction": 0.2},
            ["reward/failed_fraction", "rollout/failed_fraction"],
        ),
    ],
)
def test_series_are_labelled_by_what_distinguishes_them(title, metrics, labels):
    chart = charts(log_of(rl(**metrics)))[title]
    assert [one.name for one in chart.series] == labels
    assert chart.is_stacked == title.startswith(("How", "Outcomes", "Time"))
    assert chart.is_log_scale == title.startswith("Engine")


def test_every_metric_is_in_exactly_one_chart():
    values = {
        name: 1.0
        for name in (
            "rollout/entropy",
            "rollout/entropy_root/5",
            "rollout/forks_per_prompt",
            "actor/loss",
            "actor/ref_kl",
            "weight_sync/total_s",
            "weight_sync/bytes",
            "time/rollout_s",
            "critic/explained",
            "new",
        )
    }
    groups = chart_groups(log_of(rl(**values)))
    assert sum(len(chart.series) for group in groups for chart in group.charts) == len(values)
    others = groups[-1]
    assert others.title == "All other metrics" and others.is_collapsed
    assert [chart.title for chart in others.charts] == [
        "critic/explained",
        "new",
        "rollout/entropy_root/5",
        "weight_sync/bytes",
    ]


def test_charts_beyond_the_limit_are_counted():
    log = log_of(rl(**{f"x/{i:03}": 1.0 for i in range(MAX_OTHER_CHARTS + 3)}))
    (group,) = chart_groups(log)
    assert (len(group.charts), group.num_omitted) == (MAX_OTHER_CHARTS, 3)


def test_warm_start_and_unknown_stages_have_groups_of_their_own():
    log = log_of({"stage": "sft", "step": 1, "loss": 2.0}, {"stage": "gpu", "step": 1, "watts": 9})
    assert [group.title for group in chart_groups(log)] == ["Warm start", "Stage gpu"]


@pytest.mark.parametrize("value", [1e308, -1e308, math.inf, -math.inf, math.nan, 1e-320])
def test_every_number_is_drawn(value):
    names = ("rollout/reward_mean", "time/rollout_s", "mismatch/kl", "reward/mine", "new")
    log = log_of(*(rl(step, **dict.fromkeys(names, value)) for step in (1, 2)))
    mixed = log_of(
        *(rl(step, **dict.fromkeys(names, value * (-1) ** step)) for step in (1, 2)),
        rl(3, **dict.fromkeys(names, 1.0)),
    )
    for one in (log, mixed):
        assert all(
            render_figure(chart, "x") and chart_data(chart) for chart in charts(one).values()
        )
        assert summary_tiles(one)


def test_thousands_of_names_make_a_bounded_number_of_charts_and_lines():
    """Names that the policy or a server chose, in each family of metrics that has such names."""
    keys = ("rollout/calls/{}", "rollout/tool/{}/num_ok", "reward/{}", "rollout/agent/ignored/{}")
    values = {key.format(f"name{index}"): 1.0 for key in keys for index in range(1000)}
    groups = {group.title: group for group in chart_groups(log_of(rl(1, **values)))}
    (calls,) = [chart for chart in groups["Tools"].charts if chart.title == "Calls by tool"]
    assert len(calls.series) == MAX_SERIES and str(1000 - MAX_SERIES) in calls.note
    assert len(groups["Tools"].charts) == 1 + MAX_TOOLS
    assert len(groups["Parts of the reward"].charts) == MAX_OTHER_CHARTS
    assert len(groups["Learning"].charts[0].series) == MAX_SERIES
    shown = sum(len(group.charts) for group in groups.values())
    assert shown <= 2 + MAX_TOOLS + 2 * MAX_OTHER_CHARTS


def test_what_the_driver_watches_is_a_group_of_its_own():
    names = ("driver/loop_pause_max_s", "driver/rss_mib", "driver/rss_growth_mib")
    names += ("driver/memory_fraction", "driver/open_files_fraction", "driver/open_files_max")
    names += ("driver/agent_loop_pause_max_s", "driver/num_threads_max", "driver/oom_kills")
    names += ("gateway/held_mib", "gateway/session_held_mib", "gateway/in_flight_mib")
    groups = chart_groups(log_of(rl(**dict.fromkeys((*names, "gateway/num_connections"), 1.0))))
    assert [group.title for group in groups] == ["Driver"], "nothing is left for other groups"
    assert sum(len(chart.series) for chart in groups[0].charts) == len(names) + 1
