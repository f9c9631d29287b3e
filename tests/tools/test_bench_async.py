"""The benchmark of asynchronous rollouts: delayed answers, and lines from two runs' metrics."""

import json
import time

import pytest

from tests.fakes import FakeTools
from tools import bench_async
from tools.bench_async import DelayedTools, compare, read_steps


def steps(rollout_s, update_s, stale):
    return [
        {
            "stage": "rl",
            "step": step,
            "time/rollout_s": rollout_s,
            "time/update_s": update_s,
            "mismatch/logp_mean_abs": 0.01,
            "mismatch/logp_max_abs": 0.1 * step,
            "mismatch/ess": 0.5,
            "rollout_correction/capped_fraction": 0.01 * step,
            "rollout/staleness_mean": stale,
            "rollout/staleness_max": stale,
        }
        for step in (1, 2, 3, 4)
    ]


async def test_answers_are_delayed_in_forks_too(monkeypatch):
    monkeypatch.setattr(bench_async, "latency_s", lambda text: 60.0)
    session = DelayedTools(FakeTools(), 0.1).open_session()
    await session.create({})
    child = await session.fork()
    for one in (session, child):
        begin = time.perf_counter()
        outcome = await one.execute("python", {"text": "1"})
        assert time.perf_counter() - begin >= 0.1
        assert outcome.answer == "ok:1"


def test_lines_by_hand():
    lines = {one["case"]: one for one in compare(steps(1.0, 3.0, 1), steps(3.0, 3.0, 0))}
    assert lines["step/wall"]["ratio"] == 1.5
    assert (lines["step/waiting"]["ours"], lines["step/waiting"]["baseline"]) == (1.0, 3.0)
    assert lines["step/learning"]["ratio"] == 1.0
    assert lines["mismatch/max"]["ours"] == 0.4
    assert lines["rollout_correction/capped_fraction"]["ours"] == pytest.approx(0.025)
    assert (lines["staleness/max"]["ours"], lines["staleness/max"]["baseline"]) == (1, 0)
    assert list(lines["step/wall"]) == ["bench", "case", "unit", "ours", "baseline", "ratio"]


def test_both_ends_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in [*steps(1, 1, 0), {"stage": "x"}]))
    assert [one["step"] for one in read_steps(path)] == [2, 3]
    path.write_text(json.dumps(steps(1, 1, 0)[0]) + "\n")
    with pytest.raises(ValueError, match="--steps=1: expected at least 3"):
        read_steps(path)


def test_without_a_model_it_says_what_makes_one(tmp_path, capsys):
    assert bench_async.main(["--model", str(tmp_path)]) == 2
    assert "`make smoke`" in capsys.readouterr().err
