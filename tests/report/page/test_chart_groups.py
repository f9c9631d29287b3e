"""Which charts a log gets."""

from __future__ import annotations

import json

from mega_agentrl.report.metrics_file import parse_metrics
from mega_agentrl.report.page.chart_groups import MAX_OTHER_CHARTS, chart_groups


def log_of(*lines):
    return parse_metrics(json.dumps(line) for line in lines)


def rl(step=1, **values):
    return {"stage": "rl", "step": step, **values}


def charts(log):
    return {chart.title: chart for group in chart_groups(log) for chart in group.charts}


def names(chart):
    return [one.name for one in chart.series]


def test_nothing_logged_is_no_chart():
    assert chart_groups(log_of()) == []


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


def test_older_runs_without_seen_have_a_reward():
    assert charts(log_of(rl(**{"rollout/reward_mean": 7.0})))["Reward"].series[0].points == [(1, 7)]


def test_phases_are_stacked_by_name():
    chart = charts(log_of(rl(**{"time/rollout_s": 3.0, "time/update_s": 1.0})))
    assert names(chart["Time of a step by phase"]) == ["rollout", "update"]
    assert chart["Time of a step by phase"].is_stacked


def test_stop_reasons_that_never_happened_are_left_out():
    log = log_of(rl(**{"rollout/stop/eos": 1.0, "rollout/stop/length": 0.0}))
    assert names(charts(log)["How trajectories end"]) == ["eos"]


def test_short_names():
    found = charts(
        log_of(
            rl(
                **{
                    "mismatch/logp_max_abs": 1e-6,
                    "mismatch/prob_std_abs": 1e-7,
                    "ares/easy/alpha": 1.0,
                    "ares/hard/alpha": 2.0,
                    "actor/clipfrac": 0.0,
                    "actor/clipfrac_lower": 0.0,
                    "rollout/tool/python/num_ok": 3.0,
                    "rollout/tool/python/latency_p99_s": 3.0,
                }
            )
        )
    )
    assert names(found["Engine against trainer"]) == ["logp_max_abs"]
    assert names(found["Engine against trainer: probabilities"]) == ["std_abs"]
    assert found["Engine against trainer"].is_log_scale
    assert names(found["Per bucket: alpha"]) == ["easy", "hard"]
    assert names(found["Clipped tokens"]) == ["clipfrac", "clipfrac_lower"]
    assert names(found["Outcomes: python"]) == ["ok"]
    assert names(found["Seconds of a call: python"]) == ["p99"]


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


def test_too_many_others_are_counted():
    log = log_of(rl(**{f"x/{i:03}": 1.0 for i in range(MAX_OTHER_CHARTS + 3)}))
    (group,) = chart_groups(log)
    assert (len(group.charts), group.num_omitted) == (MAX_OTHER_CHARTS, 3)


def test_warm_start_and_unknown_stages():
    log = log_of({"stage": "sft", "step": 1, "loss": 2.0}, {"stage": "gpu", "step": 1, "watts": 9})
    assert [group.title for group in chart_groups(log)] == ["Warm start", "Stage gpu"]
