"""The policy in exact arithmetic: equal bits in every layout, and ordinary gradients."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.config.enums import Recompute
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.actor.circles import mark_extended
from tests.actor.model.lora_jobs import full_gradients
from tests.parallel.merge import assemble, relative_errors, scores_by_row
from tests.tiny_models import make_tiny_model
from tests.tree_batches import make_tree_batch

LAYOUTS = {
    "small micro-batches": ("qwen3", {}),
    "TP2-SP": ("qwen3", {"tensor": 2, "sequence_parallel": True}),
    "TP2, biases": ("llama-biases", {"tensor": 2}),
    "TP2-SP, biases": ("llama-biases", {"tensor": 2, "sequence_parallel": True}),
    "CP2": ("qwen2-tied", {"context": 2}),
    "PP2-V2, recompute all": (
        "qwen2-tied",
        {"pipeline": 2, "virtual_pipeline": 2, "recompute": Recompute.full},
    ),
    "DP2, recompute the MLP": ("qwen3", {"data": 2, "recompute": Recompute.selective}),
}
MODELS = {
    "qwen3": ("qwen3", {}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.fixture(scope="module")
def batch():
    return make_tree_batch()


@pytest.fixture(scope="module")
def results(tmp_path_factory, rank_pool, train_config, batch):
    """Return `results(model, layout, exact)`, with the folder, scores and gradients of ranks."""
    root, folders, known = tmp_path_factory.mktemp("exact"), {}, {}

    def run(model, layout, micro_batch_tokens, *, exact):
        if model not in folders:
            name, changes = MODELS[model]
            folders[model] = make_tiny_model(name, root / model, **changes)
        key = (model, str(layout), micro_batch_tokens, exact)
        if key not in known:
            config = train_config(folders[model], **layout)
            config.model.zero_mismatch = exact
            config.optim.micro_batch_tokens = micro_batch_tokens
            known[key] = rank_pool.run(full_gradients, config.parallel.world_size, config, batch)
        return folders[model], known[key]

    return run


@pytest.mark.parametrize(
    "layout",
    mark_extended(
        LAYOUTS, quick=["small micro-batches", "TP2-SP, biases", "CP2", "PP2-V2, recompute all"]
    ),
)
def test_log_probs_have_the_same_bits_in_every_layout(layout, results, batch):
    model, layout = LAYOUTS[layout]
    folder, ranks = results(model, layout, 40, exact=True)
    _, whole = results(model, {}, 4096, exact=True)
    _, ordinary = results(model, {}, 4096, exact=False)
    got, expected, near = (
        scores_by_row([scores for scores, *_ in outcome], batch)
        for outcome in (ranks, whole, ordinary)
    )
    for value, same, close in zip(got, expected, near, strict=True):
        assert torch.equal(value, same)
        torch.testing.assert_close(value, close, rtol=1e-4, atol=1e-4)
    shapes = hf_shapes(ModelShape.from_folder(folder))
    gradients, usual = (
        assemble([blocks for _, blocks, _ in outcome], shapes, atol=1e-5)
        for outcome in (ranks, ordinary)
    )
    errors = relative_errors(gradients, usual)
    assert max(errors.values()) < 1e-4, {n: e for n, e in errors.items() if e >= 1e-4}
