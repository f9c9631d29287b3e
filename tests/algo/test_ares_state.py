"""`algo.ares_state`: saved exactly, looked up by difficulty, checked, and reported."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.algo.ares import update
from mega_agentrl.algo.ares_state import AresRules, AresState, AresStats, ReleasedKl, metrics

NUMBERS = st.floats(-1e6, 1e6)
THREE = st.tuples(NUMBERS, NUMBERS, NUMBERS)
MAYBE = st.tuples(*[st.none() | NUMBERS] * 3)
STATES = st.builds(
    AresState,
    difficulty=st.dictionaries(st.text(), st.integers(0, 2)),
    targets=MAYBE,
    alphas=THREE,
    lambdas=THREE,
    betas=st.none() | THREE,
    threshold=st.none() | NUMBERS,
    released_kl=st.builds(
        ReleasedKl, betas=THREE, kl_means=MAYBE, errors=THREE, num_updates=st.integers(0, 10**6)
    ),
)


def stats(**changes):
    given = {
        "prompt_ids": ("a", "a", "b"),
        "correct_B": torch.tensor([True, False, False]),
        "hwe_B": torch.tensor([1, 3, 8]),
        "p95_B": torch.tensor([1.0, 2.0, 3.0]),
    }
    return AresStats(**given | changes)


@given(STATES)
def test_json_and_back_is_the_same_state(state):
    assert AresState.from_plain(json.loads(json.dumps(state.to_plain()))) == state


def test_a_restored_state_goes_on_as_if_it_had_not_been_away():
    rules = AresRules(min_trajectories=1)
    seen = stats(kl_B=torch.tensor([0.1, 0.2, 0.3]))
    straight = restored = AresState()
    for _ in range(5):
        straight = update(straight, seen, rules)
        restored = AresState.from_plain(
            json.loads(json.dumps(update(restored, seen, rules).to_plain()))
        )
    assert straight == restored


def test_other_fields_are_refused():
    plain = AresState().to_plain()
    del plain["alphas"]
    with pytest.raises(ValueError, match=r"expected .*alphas.*checkpoint of another version"):
        AresState.from_plain(plain)


def test_what_holds_for_a_prompt():
    state = AresState(
        difficulty={"a": 2, "b": 0},
        targets=(4.0, None, 9.0),
        alphas=(0.1, 0.2, 0.3),
        betas=(0.01, 0.02, 0.03),
    )
    code = state.codes(["a", "b", "new"])
    assert code.tolist() == [2, 0, -1]
    assert state.codes(["a", "new"], torch.tensor([0, 1])).tolist() == [2, 1]
    target = state.target_of(torch.tensor([2, 0, 1, -1]))
    assert target[:2].tolist() == [9.0, 4.0] and target[2:].isnan().all()
    assert state.alpha_of(code).tolist() == [0.3, 0.1, 0.0]
    rules = AresRules(kl_coef=0.5)
    assert state.beta_of(code, rules).tolist() == [0.03, 0.01, 0.5]
    assert AresState().beta_of(code, rules).tolist() == [0.5] * 3


def test_metrics_by_bucket():
    state = AresState(targets=(None, 2.0, 5.0), threshold=1.5)
    seen = stats(kl_B=torch.tensor([0.1, 0.3, 0.4]))
    got = metrics(state, seen, torch.tensor([1, 1, 2]), AresRules())
    assert got["ares/threshold"] == 1.5
    assert got["ares/medium/share"] == pytest.approx(2 / 3)
    assert got["ares/medium/accuracy"] == 0.5 and got["ares/medium/hwe"] == 2.0
    assert got["ares/medium/kl"] == pytest.approx(0.2) and got["ares/hard/kl"] == pytest.approx(0.4)
    assert got["ares/hard/target"] == 5.0 and got["ares/hard/alpha"] == 0.5
    assert got["ares/easy/share"] == 0.0 and got["ares/easy/beta"] == 0.01
    assert got["ares/easy/lambda"] == 0.0
    assert "ares/easy/accuracy" not in got and "ares/easy/target" not in got
    assert "ares/easy/kl" not in metrics(state, stats(), torch.tensor([1, 1, 2]), AresRules())


def test_groups_are_numbered_as_they_come():
    assert stats(prompt_ids=("z", "a", "z")).group_B().tolist() == [0, 1, 0]


def test_bad_input():
    with pytest.raises(ValueError, match=r"correct_B \(3,\), hwe_B \(2,\)"):
        stats(hwe_B=torch.ones(2))
    with pytest.raises(ValueError, match=r"kl_B \(1,\)"):
        stats(kl_B=torch.ones(1))
    with pytest.raises(ValueError, match="got 1 prompt_ids"):
        stats(prompt_ids=("a",))
    with pytest.raises(ValueError, match="name=own: expected one of paper, released"):
        AresRules(name="own")
    with pytest.raises(ValueError, match=r"unseen_B \(1,\)"):
        AresState().codes(["a", "b"], torch.zeros(1))
