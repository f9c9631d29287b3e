"""`algo.mastery`: two clean visits and a calm policy, coins that repeat, a state that is saved."""

from __future__ import annotations

import json

import pytest
import torch

from mega_agentrl.algo.mastery import RETURN_PROBABILITY, Mastery, update


def visit(state, correct, entropy):
    """Each prompt once, with two members of the given correctness and entropy."""
    ids = [name for name in correct for _ in range(2)]
    flat = [value for name in correct for value in correct[name]]
    calm = [entropy[name] for name in ids]
    return update(state, ids, torch.tensor(flat), torch.tensor(calm, dtype=torch.float64))


def test_two_clean_visits_in_a_row_at_low_entropy():
    names = "abcdef"
    entropy = {name: 0.1 * (index + 1) for index, name in enumerate(names)}
    right = dict.fromkeys(names, (True, True))
    once = visit(Mastery(), right, entropy)
    assert once.mastered() == frozenset()
    twice = visit(once, right, entropy)
    assert twice.mastered() == {"a", "b"}  # 20th percentile of .1 to .6 is .2
    failed = visit(twice, {"a": (True, False)}, entropy)
    assert failed.mastered() == {"b"}
    again = visit(failed, {"a": (True, True)}, entropy)
    assert again.mastered() == {"b"} and again.streaks["a"] == 1
    warmer = visit(twice, {"a": (True, True)}, {"a": 9.0})
    assert "a" not in warmer.mastered()
    assert once.streaks == dict.fromkeys(names, 1), "the old state is untouched"


def test_mastered_prompts_come_back_by_a_coin_that_repeats():
    names = [f"p{index}" for index in range(2000)]
    state = Mastery(streaks=dict.fromkeys(names, 2), entropies=dict.fromkeys(names, 0.5))
    assert len(state.mastered()) == 2000
    first = state.skipped(seed=1, epoch=3)
    assert first == state.skipped(seed=1, epoch=3)
    assert first != state.skipped(seed=1, epoch=4) != state.skipped(seed=2, epoch=4)
    assert len(first) == pytest.approx(2000 * (1 - RETURN_PROBABILITY), abs=60)


def test_saved_exactly():
    state = visit(Mastery(), {"a": (True, True), "b": (False, True)}, {"a": 0.1, "b": 1 / 3})
    assert Mastery.from_plain(json.loads(json.dumps(state.to_plain()))) == state
    assert Mastery().mastered() == Mastery().skipped(seed=0, epoch=0) == frozenset()


def test_bad_input():
    with pytest.raises(ValueError, match=r"correct_B \(1,\), entropy_B \(2,\)"):
        update(Mastery(), ["a"], torch.ones(1), torch.ones(2))
    with pytest.raises(ValueError, match="got 1 prompt_ids"):
        update(Mastery(), ["a"], torch.ones(2), torch.ones(2))
