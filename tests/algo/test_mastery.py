"""`algo.mastery`: mastery after two correct visits, repeatable revisits."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.algo.mastery import REVISIT_PROBABILITY, MasteryState, update
from mega_agentrl.errors import InputError


def visit(state, correct, entropy):
    """Each prompt once, with two members of the given correctness and entropy."""
    ids = [name for name in correct for _ in range(2)]
    flat = [value for name in correct for value in correct[name]]
    calm = [entropy[name] for name in ids]
    return update(state, ids, torch.tensor(flat), torch.tensor(calm, dtype=torch.float64))


def test_mastered_after_two_correct_visits_at_low_entropy():
    names = "abcdef"
    entropy = {name: 0.1 * (index + 1) for index, name in enumerate(names)}
    right = dict.fromkeys(names, (True, True))
    once = visit(MasteryState(), right, entropy)
    assert once.mastered_prompts() == frozenset()
    twice = visit(once, right, entropy)
    assert twice.mastered_prompts() == {"a", "b"}  # 20th percentile of .1 to .6 is .2
    failed = visit(twice, {"a": (True, False)}, entropy)
    assert failed.mastered_prompts() == {"b"}
    again = visit(failed, {"a": (True, True)}, entropy)
    assert again.mastered_prompts() == {"b"} and again.correct_streaks["a"] == 1
    warmer = visit(twice, {"a": (True, True)}, {"a": 9.0})
    assert "a" not in warmer.mastered_prompts()
    assert once.correct_streaks == dict.fromkeys(names, 1), "the old state is untouched"


def test_revisits_of_mastered_prompts_are_repeatable():
    names = [f"p{index}" for index in range(2000)]
    state = MasteryState(
        correct_streaks=dict.fromkeys(names, 2), last_entropies=dict.fromkeys(names, 0.5)
    )
    assert len(state.mastered_prompts()) == 2000
    first = state.skipped_prompts(seed=1, epoch=3)
    assert first == state.skipped_prompts(seed=1, epoch=3)
    assert first != state.skipped_prompts(seed=1, epoch=4) != state.skipped_prompts(seed=2, epoch=4)
    assert len(first) == pytest.approx(2000 * (1 - REVISIT_PROBABILITY), abs=60)


def test_without_a_visit_nothing_is_mastered():
    assert (
        MasteryState().mastered_prompts()
        == MasteryState().skipped_prompts(seed=0, epoch=0)
        == frozenset()
    )


def test_one_prompt_id_per_trajectory_is_required():
    with pytest.raises(InputError) as caught:
        update(MasteryState(), ["a"], torch.ones(2), torch.ones(2))
    assert (caught.value.name, caught.value.got) == ("number of prompt_ids", 1)
