"""The scalar head in half precision and without rows; models of all families use both heads."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mega_agentrl.actor.model.heads import ScalarHead
from tests.rank_shards import pack_rows

CPU = torch.device("cpu")
HIDDEN = 8


def scalar_values(weight_1D, micro, hidden_S1D):
    model = SimpleNamespace(output_weight=lambda: weight_1D)
    (value_RT,) = ScalarHead(num_positions=12)(model, micro, hidden_S1D)
    return value_RT


def test_half_precision_states_give_float32_values_of_the_same_numbers(batch):
    # Row 1 has a prompt of one token and a response of twelve.
    micro = pack_rows(batch, [1], torch.ones_like(batch.mask_BT), CPU)
    generator = torch.Generator().manual_seed(2)
    half_S1D = torch.randn(12, 1, HIDDEN, generator=generator).bfloat16()
    weight_1D = torch.randn(1, HIDDEN, generator=generator).bfloat16()
    value_RT = scalar_values(weight_1D, micro, half_S1D)
    assert value_RT.dtype == torch.float32
    exact_S = half_S1D[:, 0].double() @ weight_1D[0].double()
    torch.testing.assert_close(value_RT[0].double(), exact_S, atol=1e-5, rtol=1e-6)


def test_no_rows_give_no_values_but_a_graph(batch):
    micro = pack_rows(batch, [], batch.mask_BT, CPU)
    weight_1D = torch.ones(1, HIDDEN, requires_grad=True)
    value_RT = scalar_values(weight_1D, micro, torch.ones(1, 1, HIDDEN))
    assert value_RT.shape == (0, 12)
    value_RT.sum().backward()
    assert weight_1D.grad.abs().sum() == 0
