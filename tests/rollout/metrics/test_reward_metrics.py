"""Means of reward parts and their fields, by hand."""

from mega_agentrl.rollout.metrics.reward import reward_metrics
from mega_agentrl.types.records import Score
from tests.rollout.bare_trajectory import bare_trajectory


def row(parts, fields, reward_error=""):
    one = bare_trajectory(reward_error=reward_error)
    if not reward_error:
        one.score = Score(
            value=0.0, correct=False, f1=0.0, answer="", reason="", parts=parts, extra_info=fields
        )
    return one


def test_by_hand():
    rows = [
        row({"arpo": 1.0, "mine": 0.5}, {"mine": {"right": True, "len": 4, "why": "x"}}),
        row({"arpo": 0.0, "mine": 0.0}, {"mine": {"right": False, "len": float("inf")}}),
        row({}, {}, reward_error="hung"),
        row({}, {}),
    ]
    assert reward_metrics(rows) == {
        "reward/failed_fraction": 0.25,
        "reward/arpo": 0.5,
        "reward/mine": 0.25,
        "reward/mine/right": 0.5,
        "reward/mine/len": 4.0,
    }
    assert reward_metrics([]) == {"reward/failed_fraction": 0.0}
