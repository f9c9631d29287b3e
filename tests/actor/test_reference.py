from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.reference import Reference

SIZES = ((3, 5), (7,), (2, 2), (1,))


def weights():
    """Parameters that are views of one buffer, as Megatron's are, and one in half precision."""
    buffer = torch.arange(27.0)
    parts = buffer.split([15, 7, 4, 1])
    views = [part.view(size) for part, size in zip(parts, SIZES, strict=True)]
    return buffer, [*map(torch.nn.Parameter, views), torch.nn.Parameter(torch.ones(3).bfloat16())]


@pytest.mark.parametrize("block_bytes", [8, 24, 64, 2**20])
def test_the_kept_weights_are_in_place_inside_and_the_present_ones_after(block_bytes):
    buffer, parameters = weights()
    reference = Reference(parameters, block_bytes=block_bytes)
    addresses = [parameter.data_ptr() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(-1).sub_(0.5)
    trained = [parameter.detach().clone() for parameter in parameters]
    for _ in range(2):
        with reference.in_place():
            assert buffer.tolist() == list(range(27))
            assert parameters[-1].tolist() == [1, 1, 1]
        assert all(map(torch.equal, parameters, trained))
    assert [parameter.data_ptr() for parameter in parameters] == addresses


def test_a_failing_pass_leaves_the_present_weights():
    buffer, parameters = weights()
    reference = Reference(parameters)
    buffer.add_(1)
    with pytest.raises(RuntimeError, match="of the pass"), reference.in_place():
        raise RuntimeError("of the pass")
    assert buffer.tolist() == list(range(1, 28))


def test_freezing_again_keeps_what_is_there_then():
    buffer, parameters = weights()
    reference = Reference(parameters)
    buffer.add_(100)
    reference.freeze()
    buffer.zero_()
    with reference.in_place():
        assert buffer.tolist() == list(range(100, 127))


def test_nothing_to_keep_is_no_error():
    with Reference([]).in_place():
        pass
