from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.training.reference_weights import ReferenceWeights

SIZES = ((3, 5), (7,), (2, 2), (1,))


def weights():
    """Return parameters that are views of one buffer, as in Megatron, and a bfloat16 one."""
    buffer = torch.arange(27.0)
    parts = buffer.split([15, 7, 4, 1])
    views = [part.view(size) for part, size in zip(parts, SIZES, strict=True)]
    return buffer, [*map(torch.nn.Parameter, views), torch.nn.Parameter(torch.ones(3).bfloat16())]


@pytest.mark.parametrize("block_bytes", [8, 24, 64, 2**20])
def test_reference_weights_are_swapped_in_inside_the_context_only(block_bytes):
    buffer, parameters = weights()
    reference = ReferenceWeights(parameters, block_bytes=block_bytes)
    addresses = [parameter.data_ptr() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(-1).sub_(0.5)
    trained = [parameter.detach().clone() for parameter in parameters]
    for _ in range(2):
        with reference.swapped_in():
            assert buffer.tolist() == list(range(27))
            assert parameters[-1].tolist() == [1, 1, 1]
        assert all(map(torch.equal, parameters, trained))
    assert [parameter.data_ptr() for parameter in parameters] == addresses


def test_a_failing_pass_leaves_the_present_weights():
    buffer, parameters = weights()
    reference = ReferenceWeights(parameters)
    buffer.add_(1)
    with pytest.raises(RuntimeError, match="of the pass"), reference.swapped_in():
        raise RuntimeError("of the pass")
    assert buffer.tolist() == list(range(1, 28))


def test_a_second_snapshot_replaces_the_first():
    buffer, parameters = weights()
    reference = ReferenceWeights(parameters)
    buffer.add_(100)
    reference.snapshot()
    buffer.zero_()
    with reference.swapped_in():
        assert buffer.tolist() == list(range(100, 127))


def test_nothing_to_keep_is_no_error():
    with ReferenceWeights([]).swapped_in():
        pass
