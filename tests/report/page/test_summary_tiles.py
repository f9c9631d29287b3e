"""The summary tiles at the top of the page."""

from __future__ import annotations

import json

from mega_agentrl.report.metrics_file import parse_metrics
from mega_agentrl.report.page.summary_tiles import render_tiles, summary_tiles


def tiles_of(*lines):
    return {
        tile.name: tile for tile in summary_tiles(parse_metrics(json.dumps(line) for line in lines))
    }


def rl(step, **values):
    return {"stage": "rl", "step": step, **values}


def test_a_reward_is_compared_between_the_evaluations():
    found = tiles_of(
        {"stage": "held_out_before", "step": 0, "sampled/reward": 0.29699999},
        rl(1, **{"rollout/reward_unfiltered": 9.0, "time/rollout_s": 1.5, "time/update_s": 0.5}),
        {"stage": "held_out_after", "step": 1, "sampled/reward": 0.62},
    )
    reward = found["reward"]
    assert (reward.before, reward.value, round(reward.change, 6)) == ("0.297", "0.62", 0.323)
    assert found["RL steps"].value == "1"
    assert found["RL steps"].detail == "0:02, 2 s each"


def test_a_run_that_was_killed_compares_its_first_and_last_steps():
    lines = [rl(step, **{"rollout/reward_unfiltered": float(step)}) for step in range(1, 11)]
    before = {"stage": "held_out_before", "step": 0, "sampled/reward": 5.0}
    reward = tiles_of(before, *lines)["reward"]
    assert (reward.before, reward.value) == ("3", "8")
    assert "in training" in reward.detail


def test_a_run_with_only_an_evaluation_has_only_its_reward():
    found = tiles_of({"stage": "held_out_before", "step": 0, "sampled/reward": 0.5})
    assert (found["reward"].before, found["reward"].value) == ("", "0.5")
    assert list(found) == ["reward"]


def test_speed_entropy_forks_and_mismatch_have_tiles():
    values = {
        "perf/tokens_per_s": 100.0,
        "perf/unique_tokens_per_s": 40.0,
        "time/rollout_s": 3.0,
        "rollout/entropy": 0.5,
        "rollout/forks_per_prompt": 1.5,
        "rollout/tokens_saved_fraction": 0.25,
        "mismatch/logp_mean_abs": 2e-7,
        "mismatch/logp_max_abs": 1e-5,
    }
    found = tiles_of(rl(1, **values), rl(2, **values | {"mismatch/logp_max_abs": float("inf")}))
    assert found["tokens/s"].detail == "median; 40 with shared tokens once; 600 in all"
    assert found["forks per tree"].detail == "25.0% of the tokens shared"
    assert found["engine against trainer"].detail == "nats; largest 1e-5"
    assert (found["policy entropy"].before, found["policy entropy"].value) == ("0.5", "0.5")


def test_each_tile_is_a_card():
    tiles = tiles_of(rl(1, **{"rollout/reward_unfiltered": 1}))
    assert render_tiles(list(tiles.values())).count("tile card") == len(tiles) == 2
