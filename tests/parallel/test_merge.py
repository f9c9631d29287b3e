from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.reshard.layout import Rect
from tests.parallel.merge import assemble, relative_errors, scores_by_row
from tests.parallel.reference import make_batch
from tests.train_batches import select_rows

LEFT = ("w", Rect((0, 0), (2, 1)), torch.tensor([[1.0], [3.0]]))
RIGHT = ("w", Rect((0, 1), (2, 2)), torch.tensor([[2.0], [4.0]]))
SHAPES = {"w": (2, 2)}


def test_blocks_become_the_whole_tensor():
    whole = assemble([[LEFT], [RIGHT], [LEFT]], SHAPES, atol=0.0)
    assert torch.equal(whole["w"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


def test_a_hole_or_replicas_that_differ_are_noticed():
    with pytest.raises(AssertionError, match="held by nobody"):
        assemble([[LEFT], [LEFT]], SHAPES, atol=0.0)
    other = (*LEFT[:2], LEFT[2] + 0.1)
    with pytest.raises(AssertionError, match="replicas of w"):
        assemble([[LEFT], [RIGHT], [other]], SHAPES, atol=0.01)


def test_errors_are_by_tensor_and_tiny_tensors_are_held_against_the_whole():
    expected = {"big": torch.tensor([3.0, 4.0]), "tiny": torch.tensor([1e-9])}
    got = {"big": torch.tensor([3.0, 4.1]), "tiny": torch.tensor([2e-9])}
    errors = relative_errors(got, expected)
    assert errors["big"] == pytest.approx(0.1 / 5, rel=1e-4)
    assert errors["tiny"] == pytest.approx(1e-9 / (1e-3 * 5), rel=1e-4)


def test_every_row_is_answered_once():
    batch = select_rows(make_batch(), [0, 1])
    value_T = torch.ones(1, batch.response_BT.size(1))
    logp_BT, entropy_BT = scores_by_row(
        [([1], value_T, 2 * value_T), None, ([0], 3 * value_T, 4 * value_T)], batch
    )
    assert (logp_BT[:, 0].tolist(), entropy_BT[:, 0].tolist()) == ([3.0, 1.0], [4.0, 2.0])
    assert not math.isnan(float(logp_BT.sum()))
    with pytest.raises(AssertionError):
        scores_by_row([([1], value_T, value_T), ([1], value_T, value_T)], batch)
