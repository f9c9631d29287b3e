"""Messages there and back, and what the receiver notices."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.reshard.buckets import buffer_bytes, pack, unpack
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout
from mega_agentrl.reshard.plan import make_plan

SHAPES = {"gate": (3, 5), "up": (3, 5), "norm": (7,)}
DTYPES = {"gate": "float32", "up": "bfloat16", "norm": "float32"}


@pytest.fixture
def params():
    generator = torch.manual_seed(0)
    return {
        "fc1": torch.randn(6, 5, generator=generator),
        "norm": torch.randn(7, generator=generator).double(),
    }


@pytest.fixture
def message():
    fc1 = ShardLayout(
        "fc1",
        (6, 5),
        (
            Block("gate", Rect((0, 0), (3, 5)), Rect((0, 0), (3, 5))),
            Block("up", Rect((0, 0), (3, 5)), Rect((3, 0), (6, 5))),
        ),
    )
    norm = ShardLayout("norm", (7,), (Block("norm", Rect((0,), (7,)), Rect((0,), (7,))),))
    (message,) = make_plan([[fc1, norm]], SHAPES, DTYPES, 1).messages
    return message


def test_values_arrive_in_the_wire_type(message, params):
    buffer = pack(message, params, DTYPES, version=4)
    assert buffer.numel() == buffer_bytes(message)
    got = {p.block.hf_name: values for p, values in unpack(message, buffer, DTYPES, version=4)}
    assert torch.equal(got["gate"], params["fc1"][:3])
    assert torch.equal(got["up"], params["fc1"][3:].bfloat16())
    assert torch.equal(got["norm"], params["norm"].float())


@pytest.mark.parametrize("place", [32, 96, 140])
def test_a_changed_byte_names_tensor_rank_and_bucket(message, params, place):
    buffer = pack(message, params, DTYPES, version=4)
    buffer[place] ^= 16
    with pytest.raises(ValueError, match=r"(gate|up|norm) .*trainer rank 0 .*bucket 0"):
        list(unpack(message, buffer, DTYPES, version=4))


def test_another_version_is_refused(message, params):
    buffer = pack(message, params, DTYPES, version=4)
    with pytest.raises(ValueError, match="trainer and engine are at different updates"):
        list(unpack(message, buffer, DTYPES, version=5))
