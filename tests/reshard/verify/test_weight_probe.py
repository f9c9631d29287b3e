"""The probe: its prompt, and which differences between policy and engine are accepted."""

from __future__ import annotations

import math

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.reshard.verify.weight_probe import check_probe, probe_prompt


def test_the_prompt_is_fixed_and_inside_the_vocabulary():
    assert probe_prompt(50, 20) == probe_prompt(50, 20)
    assert probe_prompt(50, 20)[:10] == probe_prompt(50, 10)
    assert set(probe_prompt(7, 200)) == set(range(7))


def check(*differences, dtype="bfloat16"):
    policy = [-3.0 - 0.1 * number for number in range(len(differences))]
    engine = [logp + gap for logp, gap in zip(policy, differences, strict=True)]
    return check_probe("engine 1", policy, engine, dtype)


def test_an_expert_chosen_otherwise_for_one_token_of_31_is_accepted():
    rounded = [0.05, -0.05] * 15
    assert check(*rounded, 2.0) == pytest.approx(0.05)
    assert check(*rounded, -math.inf) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("differences", "dtype"),
    [
        ([0.0] * 15 + [2.0, -1.5] * 8, "bfloat16"),  # a wrong mapping: most tokens
        ([0.01] * 31, "float32"),
        ([math.nan] + [0.0] * 30, "bfloat16"),
    ],
    ids=["most tokens", "float32", "NaN"],
)
def test_other_differences_are_refused(differences, dtype):
    with pytest.raises(InputError) as caught:
        check(*differences, dtype=dtype)
    assert "engine 1" in caught.value.name
