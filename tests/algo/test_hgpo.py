"""`algo.hgpo` on numbers worked by hand."""

import pytest
import torch

from mega_agentrl.algo.advantage import grpo
from mega_agentrl.algo.hgpo import hgpo
from mega_agentrl.errors import InputError

RETURN = torch.tensor([1.0, 0.0, 0.0, 1.0])
# All four have an equal state; the first two also the one before; the last has none before.
CONTEXT = torch.tensor([[0, 0, 0, 0], [1, 1, 2, -1]])


def test_deeper_common_history_weighs_more():
    got = hgpo(RETURN, CONTEXT)
    # Less the means 1/2 and 1/2, weights 2 and 3; where only depth 0 has others, that alone.
    assert got.tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5])
    # Other returns: mean 1 at depth 0, 3/2 at depth 1.
    got = hgpo(torch.tensor([3.0, 0.0, 0.0, 1.0]), CONTEXT)
    expected = [(2 * 2 + 3 * 1.5) / 5, (2 * -1 + 3 * -1.5) / 5, -1.0, 0.0]
    assert got.tolist() == pytest.approx(expected)
    alike = hgpo(torch.tensor([3.0, 0.0, 0.0, 1.0]), CONTEXT, weight_power=0)
    assert alike.tolist() == pytest.approx([1.75, -1.25, -1.0, 0.0])


def test_turns_without_enough_history_are_not_compared_with_each_other():
    none_before = torch.tensor([[0, 1, 2, 3], [-1, -1, -1, -1]])
    assert hgpo(RETURN, none_before).tolist() == [0.0] * 4


def test_one_depth_is_the_comparison_of_equal_states():
    got = hgpo(RETURN, CONTEXT[1:], norm_by_std=True)
    torch.testing.assert_close(got[:2], grpo(RETURN[:2], torch.zeros(2)))


def test_contexts_of_other_turns_are_refused():
    with pytest.raises(InputError) as caught:
        hgpo(RETURN, CONTEXT[:, :3])
    assert (caught.value.name, caught.value.got) == ("context_KS", (2, 3))
