"""The reference exercises every parameter and the clip range."""

from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, padded_vocab_size
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.parallel.layouts import MODELS
from tests.parallel.merge import TINY_SHARE


@pytest.mark.parametrize("model", MODELS)
def test_each_tensor_of_the_checkpoint_has_a_gradient_that_counts(model, grid):
    reference = grid.reference(model)
    shape = ModelShape.from_folder(reference.folder)
    assert {n: tuple(g.shape) for n, g in reference.gradient.items()} == hf_shapes(shape)
    # None is so small that it would be held against the whole instead of itself.
    smallest = min(float(value.norm()) for value in reference.gradient.values())
    assert smallest > TINY_SHARE * reference.grad_norm
    assert padded_vocab_size(shape, 2) > shape.vocab_size


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_is_clipped_on_either_side_and_mostly_not(model, grid):
    reference = grid.reference(model)
    mask_BT = reference.batch.mask_BT
    ratio_N = (reference.logp_BT - reference.batch.old_logp_BT)[mask_BT].exp()
    assert int((ratio_N < 0.8).sum()) > 1
    assert int((ratio_N > 1.2).sum()) > 1
    inside_N = (ratio_N > 0.8) & (ratio_N < 1.2)
    assert int(inside_N.sum()) > 5
    # No token stands where rounding could decide.
    edge_N = torch.minimum((ratio_N - 0.8).abs(), (ratio_N - 1.2).abs())
    assert float(edge_N.min()) > 1e-3
    assert 1.0 < float(reference.entropy_BT[mask_BT].mean()) < math.log(61)
