"""`algo.ares.state`: lookups by difficulty, checks, metrics."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.algo.ares.state import AresHyperparams, AresState, AresStats, metrics
from mega_agentrl.errors import InputError


def stats(**changes):
    given = {
        "prompt_ids": ("a", "a", "b"),
        "correct_B": torch.tensor([True, False, False]),
        "hwe_B": torch.tensor([1, 3, 8]),
        "p95_B": torch.tensor([1.0, 2.0, 3.0]),
    }
    return AresStats(**given | changes)


def test_a_prompt_has_the_values_of_its_difficulty():
    state = AresState(
        difficulty_by_prompt={"a": 2, "b": 0},
        targets=(4.0, None, 9.0),
        alphas=(0.1, 0.2, 0.3),
        betas=(0.01, 0.02, 0.03),
    )
    code = state.difficulty_codes(["a", "b", "new"])
    assert code.tolist() == [2, 0, -1]
    assert state.difficulty_codes(["a", "new"], torch.tensor([0, 1])).tolist() == [2, 1]
    target = state.targets_for(torch.tensor([2, 0, 1, -1]))
    assert target[:2].tolist() == [9.0, 4.0] and target[2:].isnan().all()
    assert state.alphas_for(code).tolist() == [0.3, 0.1, 0.0]
    hyperparams = AresHyperparams(kl_coef=0.5)
    assert state.betas_for(code, hyperparams).tolist() == [0.03, 0.01, 0.5]
    assert AresState().betas_for(code, hyperparams).tolist() == [0.5] * 3


def test_each_bucket_has_metrics_of_its_own():
    state = AresState(targets=(None, 2.0, 5.0), threshold=1.5)
    batch_stats = stats(kl_B=torch.tensor([0.1, 0.3, 0.4]))
    got = metrics(state, batch_stats, torch.tensor([1, 1, 2]), AresHyperparams())
    assert got["ares/threshold"] == 1.5
    assert got["ares/medium/share"] == pytest.approx(2 / 3)
    assert got["ares/medium/accuracy"] == 0.5 and got["ares/medium/hwe"] == 2.0
    assert got["ares/medium/kl"] == pytest.approx(0.2) and got["ares/hard/kl"] == pytest.approx(0.4)
    assert got["ares/hard/target"] == 5.0 and got["ares/hard/alpha"] == 0.5
    assert got["ares/easy/share"] == 0.0 and got["ares/easy/beta"] == 0.01
    assert got["ares/easy/lambda"] == 0.0
    assert "ares/easy/accuracy" not in got and "ares/easy/target" not in got
    assert "ares/easy/kl" not in metrics(state, stats(), torch.tensor([1, 1, 2]), AresHyperparams())


def test_groups_are_numbered_as_they_come():
    assert stats(prompt_ids=("z", "a", "z")).group_B().tolist() == [0, 1, 0]


def test_one_prompt_id_per_trajectory_and_a_known_rule_are_required():
    with pytest.raises(InputError) as caught:
        stats(prompt_ids=("a",))
    assert (caught.value.name, caught.value.got) == ("number of prompt_ids", 1)
    with pytest.raises(InputError) as caught:
        AresHyperparams(name="own")
    assert (caught.value.name, caught.value.got) == ("name", "own")
