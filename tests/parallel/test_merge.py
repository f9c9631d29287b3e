"""The grid's comparisons notice what is missing, doubled or different."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.reshard.layout import Rect
from tests.parallel.merge import assemble, relative_errors, scores_by_row
from tests.parallel.reference import make_batch
from tests.train_batches import select_rows

LEFT = ("w", Rect((0, 0), (2, 1)), torch.tensor([[1.0], [3.0]]))
RIGHT = ("w", Rect((0, 1), (2, 2)), torch.tensor([[2.0], [4.0]]))


def test_a_hole_and_replicas_that_differ_are_noticed():
    with pytest.raises(AssertionError, match="held by nobody"):
        assemble([[LEFT], [LEFT]], {"w": (2, 2)}, atol=0.0)
    other = (*LEFT[:2], LEFT[2] + 0.1)
    with pytest.raises(AssertionError, match="replicas of w"):
        assemble([[LEFT], [RIGHT], [other]], {"w": (2, 2)}, atol=0.01)


def test_errors_are_by_tensor_and_those_of_tiny_tensors_relative_to_all():
    expected = {"big": torch.tensor([3.0, 4.0]), "tiny": torch.tensor([1e-9])}
    found = {"big": torch.tensor([3.0, 4.1]), "tiny": torch.tensor([2e-9])}
    errors = relative_errors(found, expected)
    assert errors["big"] == pytest.approx(0.1 / 5, rel=1e-4)
    assert errors["tiny"] == pytest.approx(1e-9 / (1e-3 * 5), rel=1e-4)


def test_a_row_that_is_answered_twice_is_noticed():
    batch = select_rows(make_batch(), [0, 1])
    values_T = torch.ones(1, batch.response_BT.size(1))
    with pytest.raises(AssertionError):
        scores_by_row([([1], values_T, values_T), ([1], values_T, values_T)], batch)
