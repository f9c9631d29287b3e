"""The same weights give the same results in every parallel layout.

Every layout against transformers and torch in one process: log-probs and entropy within 1e-4,
the gradient of the whole objective within 1e-4 of each tensor's norm, losses of AdamW's steps.
The layouts of `QUICK` by default, those of `COVER` under the marker `extended`, every cut of every
model under `slow`.
"""

from __future__ import annotations

import math

import pytest
import torch

from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, padded_vocab_size
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.parallel.conftest import BUDGETS
from tests.parallel.layouts import COVER, EACH_ONCE, GRID, MODELS, QUICK, name_of
from tests.parallel.merge import TINY_SHARE, assemble, relative_errors, scores_by_row
from tests.parallel.reference import NUM_STEPS

REST = [cell for cell in EACH_ONCE if cell not in COVER]
CELLS = [
    *(
        pytest.param(cell, id=name_of(cell), marks=() if cell in QUICK else pytest.mark.extended)
        for cell in COVER
    ),
    *(pytest.param(cell, id=name_of(cell), marks=pytest.mark.slow(0.8)) for cell in REST),
]
every_layout = pytest.mark.parametrize("cell", CELLS, scope="session")


def gradient(grid, cell, budget):
    """Return the full gradient before clipping, by Hugging Face name."""
    shapes = {name: value.shape for name, value in grid.reference(cell["model"]).gradient.items()}
    ranks = [rank.updates[budget][1] for rank in grid.measured(cell)]
    return assemble(ranks, shapes, atol=1e-5)


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


@every_layout
def test_a_layout_scores_like_transformers(cell, grid):
    reference = grid.reference(cell["model"])
    got = scores_by_row([rank.scores for rank in grid.measured(cell)], reference.batch)
    torch.testing.assert_close(got[0], reference.logp_BT, rtol=0, atol=1e-4)
    torch.testing.assert_close(got[1], reference.entropy_BT, rtol=0, atol=1e-4)


@every_layout
def test_a_layout_has_the_gradient_of_one_process(cell, grid):
    reference = grid.reference(cell["model"])
    for budget in BUDGETS:
        errors = relative_errors(gradient(grid, cell, budget), reference.gradient)
        assert max(errors.values()) < 1e-4, {n: e for n, e in errors.items() if e >= 1e-4}
        for rank in grid.measured(cell):
            stats = rank.updates[budget][0]
            assert stats.loss == pytest.approx(reference.loss, abs=1e-5)
            assert stats.grad_norm == pytest.approx(reference.grad_norm, rel=1e-4)
            assert stats.num_tokens == int(reference.batch.mask_BT.sum())
            assert 0.05 < stats.metrics["clipfrac"] < 0.95
            assert stats.num_skipped_steps == 0


@every_layout
def test_a_layout_steps_like_adamw_and_skips_gradients_that_are_not_finite(cell, grid):
    reference, ranks = grid.reference(cell["model"]), grid.measured(cell)
    kinds = 2 if cell["model"] == "qwen3_moe" else 1
    for rank in ranks:
        # Each rank in turn had the NaN, in each kind of gradient; all ranks skipped each time.
        assert rank.applied == [False] * kinds * len(ranks)
        assert rank.skipped.num_skipped_steps == 1
        assert rank.weights_unchanged
        assert [stats.num_skipped_steps for stats in rank.curve] == [0] * NUM_STEPS
        # As if the skipped steps had never been taken: moments and step count too.
        assert [stats.loss for stats in rank.curve] == pytest.approx(reference.curve, abs=1e-4)
    assert reference.curve[-1] < reference.curve[0] - 0.5


@every_layout
def test_the_cut_into_micro_batches_leaves_the_gradient(cell, grid):
    one_by_one, at_once = (gradient(grid, cell, budget) for budget in BUDGETS)
    errors = relative_errors(one_by_one, at_once)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("llama", marks=pytest.mark.extended),
        "qwen3_moe",
        *(
            pytest.param(model, marks=pytest.mark.slow(4))
            for model in MODELS
            if model not in ("llama", "qwen3_moe")
        ),
    ],
)
def test_data_ranks_do_not_change_the_gradient(model, distributed_optimizer, grid):
    single = dict.fromkeys(("tensor", "pipeline", "context", "expert", "expert_tensor"), 1)
    single |= {"model": model, "distributed_optimizer": distributed_optimizer}
    alone, shared = (
        next(cell for cell in GRID if cell["data"] == data and single.items() <= cell.items())
        for data in (1, 2)
    )
    errors = relative_errors(gradient(grid, shared, BUDGETS[0]), gradient(grid, alone, BUDGETS[1]))
    assert max(errors.values()) < 1e-5, errors
