"""Means of parts and fields, by hand."""

from mega_agentrl.rollout.reward_metrics import reward_metrics
from mega_agentrl.types.records import Score
from tests.rollout.bare_trajectory import bare_trajectory


def row(parts, fields, no_reward=""):
    one = bare_trajectory(no_reward=no_reward)
    if not no_reward:
        one.score = Score(
            value=0.0, correct=False, f1=0.0, answer="", reason="", parts=parts, fields=fields
        )
    return one


def test_by_hand():
    rows = [
        row({"arpo": 1.0, "mine": 0.5}, {"mine": {"right": True, "len": 4, "why": "x"}}),
        row({"arpo": 0.0, "mine": 0.0}, {"mine": {"right": False, "len": float("inf")}}),
        row({}, {}, no_reward="hung"),
        row({}, {}),
    ]
    assert reward_metrics(rows) == {
        "reward/failed": 0.25,
        "reward/arpo": 0.5,
        "reward/mine": 0.25,
        "reward/mine/right": 0.5,
        "reward/mine/len": 4.0,
    }
    assert reward_metrics([]) == {"reward/failed": 0.0}
