"""The rubric and what works for it: started where it is needed, checked, ended."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from mega_agentrl.config.reward_schema import RewardConfig, RewardModelConfig
from mega_agentrl.runtime import rewards as module
from mega_agentrl.runtime.rewards import open_rubric
from tests.rollout.bare_trajectory import bare_trajectory

MINE = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "key": os.environ.get("MINE_KEY"), "other": os.environ.get("OTHER")}
"""
WAIT_S = 300.0


def mine(tmp_path, text=MINE, **changes):
    (tmp_path / "mine.py").write_text(text)
    values = {
        "rubric": {"default": {"mine": 1.0}},
        "functions": {"mine": f"{tmp_path}/mine.py", "unused": "no_such_module"},
        "environment": ["MINE_KEY"],
        "workers": 1,
    }
    return RewardConfig(**(values | changes))


def test_without_functions_nothing_is_started(monkeypatch):
    monkeypatch.setattr(module, "WorkerPool", lambda *_, **__: pytest.fail("started"))
    monkeypatch.setattr(module, "Judge", lambda *_, **__: pytest.fail("started"))
    with open_rubric(RewardConfig()) as rubric:
        assert not isinstance(rubric.score(bare_trajectory()), Future)


def test_functions_see_the_variables_that_are_named_and_are_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE_KEY", "secret")
    monkeypatch.setenv("OTHER", "other")
    with open_rubric(mine(tmp_path)) as rubric:
        score = rubric.score(bare_trajectory()).result(WAIT_S)
        assert score.fields == {"mine": {"key": "secret", "other": None}}
    with pytest.raises(RuntimeError, match="closed"):
        rubric.score(bare_trajectory())


def test_what_is_wrong_is_found_at_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv("MINE_KEY", raising=False)
    with pytest.raises(ValueError, match=r"reward\.environment: the environment variable MINE_KEY"):
        with open_rubric(mine(tmp_path)):
            pass
    with pytest.raises(ValueError, match="has no function compute_score"):
        with open_rubric(mine(tmp_path, "x = 1", environment=[])):
            pass


def test_a_judge_gets_its_key_and_is_closed(monkeypatch):
    made = []

    def judge(*args, **kwargs):
        made.append(SimpleNamespace(args=args, kwargs=kwargs, closed=0, close=close))
        return made[0]

    def close():
        made[0].closed += 1

    monkeypatch.setattr(module, "Judge", judge)
    model = RewardModelConfig(source="http://here/v1", name="grader", key_env="JUDGE_KEY")
    config = RewardConfig(rubric={"default": {"model": 1.0}}, model=model, deadline_s=7.0)
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match=r"model\.key_env: the environment variable JUDGE_KEY"):
        with open_rubric(config):
            pass
    monkeypatch.setenv("JUDGE_KEY", "k")
    with open_rubric(config):
        assert made[0].args == ("http://here/v1", "grader")
        assert made[0].kwargs == {"deadline_s": 7.0, "api_key": "k"}
        assert not made[0].closed
    assert made[0].closed == 1
    with open_rubric(
        RewardConfig(rubric={"default": {"model": 1.0}}, model=RewardModelConfig("f"))
    ):
        assert len(made) == 1
