"""Adapters in every kind of layout: equal to merged weights, and trained by the gradients of these.

The expected gradients are those of a model without adapters whose weights are the merged ones, by
the chain rule: of W + s B A the gradients of A and B are s B^T dW and s dW A^T.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from mega_agentrl.actor.checkpoint.hf_export import convert_checkpoint_to_hf
from mega_agentrl.actor.model.lora import LoraWeight
from mega_agentrl.config.enums import LoraTarget, Recompute
from mega_agentrl.config.sections.policy import LoraConfig
from mega_agentrl.reshard.mapping.lora_layout import lora_shapes
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.actor.circles import mark_extended
from tests.actor.model.lora_jobs import (
    full_gradients,
    peft_refusal,
    resume_adapters,
    start_from_peft,
    train_adapters,
)
from tests.parallel.merge import assemble, relative_errors, scores_by_row
from tests.tiny_models import make_tiny_model
from tests.tree_batches import make_tree_batch

if TYPE_CHECKING:
    from pathlib import Path

RANK, ALPHA = 3, 6.0
ALIGNED_RANK = 4
"""A rank with which the factors of experts can be multiplied as one grouped product."""
LAYOUTS = {
    "one rank": ("qwen3_moe", {}),
    "grouped experts": ("qwen3_moe", {}),
    "recompute all": ("qwen2", {"recompute": Recompute.full}),
    "recompute the MLP": ("qwen3_moe", {"recompute": Recompute.selective}),
    "TP2": ("qwen3-tied", {"tensor": 2}),
    "TP2-SP-EP2": ("qwen3_moe", {"tensor": 2, "expert": 2, "sequence_parallel": True}),
    "TP2-SP-ETP2": ("qwen3_moe", {"tensor": 2, "expert_tensor": 2, "sequence_parallel": True}),
    "DP2": ("qwen3_moe", {"data": 2, "expert": 2}),
    "DP2-plain": ("llama", {"data": 2, "distributed_optimizer": False}),
    "CP2": ("llama", {"context": 2}),
    "PP2-V2-recompute": (
        "qwen3-tied",
        {"pipeline": 2, "virtual_pipeline": 2, "recompute": Recompute.full},
    ),
    "TP2-PP2-SP": ("qwen3-tied", {"tensor": 2, "pipeline": 2, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, made = tmp_path_factory.mktemp("lora"), {}

    def folder(model):
        if model not in made:
            name, _, tied = model.partition("-")
            made[model] = make_tiny_model(name, root / model, tied=bool(tied))
            (made[model] / "tokenizer.json").write_text("{}")
        return made[model]

    return folder


@pytest.fixture(scope="module")
def batch():
    batch = make_tree_batch()
    batch.mask_BT[0, 0] = True
    return batch


def lora_config(train_config, folder, layout, targets=tuple(LoraTarget), rank=RANK):
    config = train_config(folder, **layout)
    config.model.lora = LoraConfig(rank=rank, alpha=ALPHA, targets=list(targets))
    config.algo.kl_coef = 0.1
    config.optim.micro_batch_tokens = 40
    return config


@pytest.fixture(scope="module")
def base_logp(folders, rank_pool, train_config, batch):
    """Return `base_logp(model)`: log-probs `[B, T]` of a model without adapters."""

    @cache
    def compute(model):
        ((scores, *_),) = rank_pool.run(full_gradients, 1, train_config(folders(model)), batch)
        return scores_by_row([scores], batch)[0]

    return compute


@pytest.mark.parametrize("name", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
def test_output_and_gradients_of_a_layer_are_those_of_the_merged_weight(name, folders, one_rank):
    shape = ModelShape.from_folder(folders("qwen2"))
    layout = megatron_layout(shape, one_rank.coordinates.model_parallel_rank)
    shard = next(shard for shard in layout if shard.name.endswith(f"{name}.weight"))
    config = LoraConfig(rank=RANK, alpha=ALPHA, targets=list(LoraTarget))
    adapters = LoraWeight(shard, config, torch.float64, one_rank, sequence=False)
    generator = torch.Generator().manual_seed(4)
    for parameter in adapters.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    num_rows, num_columns = shard.shape
    options = {"generator": generator, "dtype": torch.float64}
    input_S1I = torch.randn(5, 1, num_columns, **options).requires_grad_()
    weight_OI, grad_S1O = (
        torch.randn(shard.shape, **options),
        torch.randn(5, 1, num_rows, **options),
    )
    merged_OI = weight_OI.clone()
    for block in shard.blocks:
        factors = adapters[block.hf_name.split(".")[-2]]
        rows = slice(block.hf_rect.start[0], block.hf_rect.stop[0])
        change = ALPHA / RANK * factors.B[rows] @ factors.A
        merged_OI[block.local_rect.slices] = weight_OI[block.local_rect.slices] + change
    leaves = [input_S1I, *adapters.parameters()]
    assert len(leaves) == 1 + 2 * len({block.hf_name for block in shard.blocks})
    got_S1O = adapters(input_S1I, functional.linear(input_S1I, weight_OI))
    expected_S1O = functional.linear(input_S1I, merged_OI)
    torch.testing.assert_close(got_S1O, expected_S1O, rtol=1e-12, atol=1e-12)
    got, expected = (
        torch.autograd.grad(output, leaves, grad_S1O) for output in (got_S1O, expected_S1O)
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "layout",
    mark_extended(LAYOUTS, quick=["one rank", "grouped experts", "PP2-V2-recompute"]),
)
def test_adapters_equal_merged_weights(
    layout, folders, rank_pool, train_config, batch, base_logp, tmp_path
):
    rank = ALIGNED_RANK if layout == "grouped experts" else RANK
    model, layout = LAYOUTS[layout]
    config = lora_config(train_config, folders(model), layout, rank=rank)
    size = config.parallel.world_size
    ranks = rank_pool.run(train_adapters, size, config, batch, tmp_path)
    merged = train_config(tmp_path / "merged")
    merged.algo.kl_coef = 0.1
    merged.optim.micro_batch_tokens = 4096
    ((scores, gradients, stats),) = rank_pool.run(full_gradients, 1, merged, batch)

    # W x + s B (A x) rounds as differently from the merged weight as two layouts (`test_grid`).
    got = scores_by_row([result.scores for result in ranks], batch)
    for value, expected in zip(got, scores_by_row([scores], batch), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-4)
    # New adapters change nothing, and neither do they in the reference.
    base_BT = base_logp(model)
    for name in ("fresh", "reference"):
        logp_BT = scores_by_row([getattr(result, name) for result in ranks], batch)[0]
        torch.testing.assert_close(logp_BT, base_BT, rtol=0, atol=1e-5)
    assert float((got[0] - base_BT).abs().max()) > 0.1

    shapes = hf_shapes(ModelShape.from_folder(folders(model)))
    adapter_shapes = lora_shapes(shapes, rank, list(LoraTarget))
    adapters = assemble([result.adapters for result in ranks], adapter_shapes, atol=0)
    expected = expected_gradients(assemble([gradients], shapes, atol=1e-5), adapters, ALPHA / rank)
    found = assemble([result.gradients for result in ranks], adapter_shapes, atol=1e-5)
    errors = relative_errors(found, expected)
    assert max(errors.values()) < 1e-4, {n: e for n, e in errors.items() if e >= 1e-4}
    norm = float(torch.cat([value.flatten() for value in expected.values()]).norm())
    for result in ranks:
        assert result.stats.loss == pytest.approx(stats.loss, abs=1e-5)
        assert result.stats.grad_norm == pytest.approx(norm, rel=1e-4)
        assert result.losses[-1] < result.losses[0]
        assert result.frozen
    num_elements = sum(torch.Size(shape).numel() for shape in adapter_shapes.values())
    if size == 1:
        assert ranks[0].num_state_elements == 2 * num_elements


@pytest.mark.parametrize(
    "layout", mark_extended(["recompute all", "TP2-PP2-SP"], quick=["recompute all"])
)
def test_exact_log_probs_are_those_of_merged_weights_bit_by_bit(
    layout, folders, rank_pool, train_config, batch, tmp_path
):
    model, layout = LAYOUTS[layout]
    config = lora_config(train_config, folders(model), layout)
    config.model.zero_mismatch = True
    ranks = rank_pool.run(train_adapters, config.parallel.world_size, config, batch, tmp_path)
    merged = train_config(tmp_path / "merged")
    merged.model.zero_mismatch = True
    ((scores, *_),) = rank_pool.run(full_gradients, 1, merged, batch)
    got = scores_by_row([rank.scores for rank in ranks], batch)
    for value, expected in zip(got, scores_by_row([scores], batch), strict=True):
        assert torch.equal(value, expected)
    for rank in ranks:
        assert rank.losses[-1] < rank.losses[0]


def expected_gradients(gradients, adapters, scale):
    expected = {}
    for name, value in adapters.items():
        module, factor = name.removesuffix(".weight").rsplit(".lora_", 1)
        gradient, other = gradients[f"{module}.weight"], adapters[other_factor(module, factor)]
        expected[name] = scale * (other.T @ gradient if factor == "A" else gradient @ other.T)
        assert expected[name].shape == value.shape
    return expected


def other_factor(module, factor):
    return f"{module}.lora_{'B' if factor == 'A' else 'A'}.weight"


@dataclass
class SavedAdapters:
    """A checkpoint of adapters, trained on two tensor ranks and resumed on the same."""

    root: Path
    """Its folders: `checkpoint`, and `resumed-1` with the merged weights."""
    shapes: dict[str, tuple[int, ...]]
    values: dict[str, torch.Tensor]
    last_loss: float
    next_loss: float
    """Losses of the steps before and after the save."""


@pytest.fixture(scope="module")
def saved(folders, rank_pool, train_config, batch, tmp_path_factory):
    folder, root = folders("qwen3_moe"), tmp_path_factory.mktemp("adapters")
    layout = {"tensor": 2, "expert_tensor": 2, "sequence_parallel": True}
    config = lora_config(train_config, folder, layout)
    trained = rank_pool.run(train_adapters, 2, config, batch, root)
    resumed = rank_pool.run(resume_adapters, 2, config, batch, root)
    shapes = lora_shapes(hf_shapes(ModelShape.from_folder(folder)), RANK, list(LoraTarget))
    values = assemble([adapters for adapters, _ in resumed], shapes, atol=0)
    return SavedAdapters(root, shapes, values, trained[0].losses[-1], resumed[0][1])


def test_a_checkpoint_of_adapters_is_resumed_in_another_layout(
    saved, folders, rank_pool, train_config, batch
):
    config = lora_config(train_config, folders("qwen3_moe"), {"pipeline": 2})
    ranks = rank_pool.run(resume_adapters, 2, config, batch, saved.root)
    got = assemble([adapters for adapters, _ in ranks], saved.shapes, atol=0)
    assert all(torch.equal(got[name], saved.values[name]) for name in saved.shapes)
    assert ranks[0][1] == pytest.approx(saved.next_loss, abs=1e-5)
    assert saved.next_loss < saved.last_loss


def test_a_checkpoint_of_adapters_is_converted_to_merged_weights(saved, folders, tmp_path):
    convert_checkpoint_to_hf(saved.root / "checkpoint", folders("qwen3_moe"), tmp_path / "hf")
    merged, converted = (
        load_file(folder / "model.safetensors")
        for folder in (saved.root / "resumed-1", tmp_path / "hf")
    )
    assert merged.keys() == converted.keys()
    for name, value in merged.items():
        torch.testing.assert_close(converted[name], value, rtol=0, atol=1e-6)


def test_exported_adapters_are_what_a_new_policy_starts_from(
    saved, folders, rank_pool, train_config, tmp_path
):
    folder, out = folders("qwen3_moe"), tmp_path / "peft"
    arguments = ["--model", str(folder), "--out", str(out), "--adapter"]
    from tools import export_hf  # needs Hydra, which the environment of the GPU tests lacks

    assert export_hf.main([str(saved.root / "checkpoint"), *arguments]) == 0
    tensors = load_file(out / "adapter_model.safetensors")
    names = {name.removeprefix("base_model.model."): name for name in tensors}
    assert {name: tuple(tensors[names[name]].shape) for name in names} == saved.shapes
    settings = json.loads((out / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (RANK, ALPHA)
    config = lora_config(train_config, folder, {"tensor": 2, "sequence_parallel": True})
    config.model.lora.path = str(out)
    found = assemble(rank_pool.run(start_from_peft, 2, config), saved.shapes, atol=0)
    assert all(torch.equal(found[name], saved.values[name]) for name in saved.shapes)
    config.model.lora.rank = RANK + 1
    assert rank_pool.run(peft_refusal, 2, config) == [("model.lora.rank", RANK + 1)] * 2


def test_some_layers_alone_get_adapters(folders, rank_pool, train_config, batch, tmp_path):
    targets = (LoraTarget.q_proj, LoraTarget.v_proj, LoraTarget.up_proj)
    config = lora_config(train_config, folders("llama"), {}, targets)
    (rank,) = rank_pool.run(train_adapters, 1, config, batch, tmp_path)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name, *_ in rank.adapters} == {
        "q_proj",
        "v_proj",
        "up_proj",
    }
    assert rank.losses[-1] < rank.losses[0]
