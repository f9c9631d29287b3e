"""Vision-language models against transformers: log-probs, gradients of tower and text, layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest
import torch
from torch.nn import functional

from mega_agentrl.actor.model.gpt_model import build_model_chunks
from mega_agentrl.actor.model.vision_tower import (
    attend_by_length,
    build_vision_tower,
    embed_patches,
)
from mega_agentrl.config.enums import Recompute
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.reshard.hf_checkpoint import read_shards
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.vision.processor import ImageProcessor
from tests.actor.circles import mark_extended
from tests.actor.model.model_jobs import differentiate
from tests.rank_shards import pack_rows
from tests.vision_batches import (
    load_vision_model,
    make_vision_batch,
    score_rows,
    stored_gradients,
    without_images,
)
from tests.vision_models import VISION_FAMILIES, make_vision_model

LAYOUTS = {
    "one rank": {},
    "recomputed": {"recompute": Recompute.full},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence_parallel": True},
    "sequence, recomputed": {
        "tensor": 2, "sequence_parallel": True, "recompute": Recompute.full,
    },
    "pipeline": {"pipeline": 2},
    "virtual pipeline": {"pipeline": 2, "virtual_pipeline": 2},
    "data": {"data": 2},
    "context": {"context": 2},
    "sequence, pipeline": {"tensor": 2, "pipeline": 2, "sequence_parallel": True},
    "sequence, context": {"tensor": 2, "context": 2, "sequence_parallel": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")
    return {name: make_vision_model(name, root / name) for name in VISION_FAMILIES}


@pytest.fixture(scope="module")
def batches(folders):
    return {name: make_vision_batch(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def expected(folders):
    """Return `expected(family, batch)`: log-probs and gradients of their weighted sum."""

    def compute(family, batch):
        network = load_vision_model(folders[family])
        logp_BT = score_rows(network, folders[family], batch)
        (logp_BT * batch.advantage_BT * batch.mask_BT).sum().backward()
        return logp_BT.detach() * batch.mask_BT, stored_gradients(network)

    return compute


@pytest.fixture(scope="module")
def references(batches, expected):
    """Return `references(family)`: log-probs and gradients for the batch with images."""
    return cache(lambda family: expected(family, batches[family]))


def run(rank_pool, folder, batch, layout):
    layout = ParallelConfig(**layout, distributed_optimizer=False)
    return rank_pool.run(differentiate, layout.world_size, str(folder), layout, batch)


def assert_equal(results, reference, *, tolerance=1e-5):
    """Compare log-probs, and gradients relative to the largest of their kind."""
    expected_BT, gradients = reference
    found_BT, seen = torch.zeros_like(expected_BT), set()
    for result in results:
        for rows, value_RT in result.values:
            for row, value_T in zip(rows, value_RT, strict=True):
                # Context ranks give a part of the tokens each, tensor ranks all of them.
                found_BT[row] = torch.where(value_T != 0, value_T, found_BT[row])
        for name, rect, gradient in result.gradients:
            whole = gradients[name]
            if whole is None:
                assert gradient.abs().max() == 0, name
            else:
                error = (gradient - whole[rect.slices]).norm() / whole.norm()
                assert error < 10 * tolerance, f"{name} {rect}: relative error {error}"
            seen.add(name)
    assert seen == set(gradients)
    torch.testing.assert_close(found_BT, expected_BT, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("family", "layout"),
    mark_extended(
        product(VISION_FAMILIES, LAYOUTS),
        quick=[
            ("qwen2_5_vl", "one rank"),
            ("qwen3_vl", "recomputed"),
            ("qwen3_vl", "sequence"),
            ("qwen3_vl", "virtual pipeline"),
            ("qwen3_vl", "context"),
        ],
    ),
)
def test_log_probs_and_gradients_are_those_of_transformers(
    rank_pool, folders, batches, references, family, layout
):
    results = run(rank_pool, folders[family], batches[family], LAYOUTS[layout])
    assert_equal(results, references(family))
    # A gradient norm counts every element once; embedding and output layer have 3 rows of padding.
    shape = ModelShape.from_folder(folders[family])
    whole = sum(torch.Size(size).numel() for size in hf_shapes(shape).values())
    assert sum(result.counted for result in results) == whole + 2 * 3 * shape.hidden_size


@pytest.mark.extended
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_tied_embedding_on_two_stages_gives_the_results_of_transformers(
    rank_pool, tmp_path, family
):
    folder = make_vision_model(family, tmp_path, tied=True)
    batch, network = make_vision_batch(folder), load_vision_model(folder)
    logp_BT = score_rows(network, folder, batch)
    (logp_BT * batch.advantage_BT * batch.mask_BT).sum().backward()
    reference = logp_BT.detach() * batch.mask_BT, stored_gradients(network)
    assert_equal(run(rank_pool, folder, batch, LAYOUTS["sequence, pipeline"]), reference)


@pytest.mark.parametrize(
    ("family", "layout"),
    mark_extended(
        product(VISION_FAMILIES, ["one rank", "sequence", "context"]),
        quick=[("qwen2_5_vl", "context"), ("qwen3_vl", "sequence")],
    ),
)
def test_a_batch_without_images_leaves_the_tower_alone(
    rank_pool, folders, batches, expected, family, layout
):
    batch = without_images(batches[family])
    reference = expected(family, batch)
    assert all(value is None for name, value in reference[1].items() if "visual." in name)
    assert_equal(run(rank_pool, folders[family], batch, LAYOUTS[layout]), reference)


@pytest.mark.parametrize("family", mark_extended(VISION_FAMILIES, quick=["qwen3_vl"]))
def test_flat_rows_give_the_same_as_trees(rank_pool, folders, batches, references, family):
    flat = batches[family].with_fields(tree_order_B=None, shared_length_B=None)
    results = run(rank_pool, folders[family], flat, LAYOUTS["sequence"])
    assert_equal(results, references(family))


@pytest.fixture
def chunk(one_rank, folders):
    """Return `chunk(family)`: the loaded model of one rank."""

    def load(family):
        shape, groups = ModelShape.from_folder(folders[family]), one_rank
        processor = ImageProcessor(folders[family])
        (model,) = build_model_chunks(
            shape, groups, ParallelConfig(), torch.float32, image_processor=processor
        )
        layout = megatron_layout(shape, groups.coordinates.model_parallel_rank)
        read_shards(folders[family], layout, hf_shapes(shape), dict(model.named_parameters()))
        return model

    return load


def pack(batch):
    rows = range(batch.num_rows)
    return pack_rows(batch, rows, batch.mask_BT, torch.device("cpu"), has_images=True)


def logits(model, micro):
    with torch.no_grad():
        return model.forward_packed(micro).squeeze(1) @ model.output_weight().t()


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_positions_of_a_text_model_would_be_noticed(chunk, batches, family):
    model, micro = chunk(family), pack(batches[family])
    plain = replace(micro, rotary_position_3S=micro.position_S.expand(3, -1))
    error_S = (logits(model, micro) - logits(model, plain)).abs().amax(dim=1)
    first = int(micro.images.place_P[0])
    # Up to the first image, and one feature further, they are the same.
    assert error_S[: first + 1].max() < 1e-4
    assert error_S[first + 1 :].median() > 0.05


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_an_image_is_encoded_once_for_all_of_its_rows(chunk, batches, family):
    model, micro = chunk(family), pack(batches[family])
    grids = []
    model.vision.register_forward_pre_hook(
        lambda _, args, kwargs: grids.append(kwargs["grid_thw"].tolist()), with_kwargs=True
    )
    logits(model, micro)
    # A, B and C; A is in two trees, and in three rows of one of them.
    assert grids == [[[1, 2, 4], [1, 6, 6], [1, 4, 2]]]
    assert len(micro.images.place_P) == (2 + 9 + 2) + (2 + 9)


def test_segments_of_a_length_are_attended_to_together(monkeypatch):
    calls = []
    attend = functional.scaled_dot_product_attention

    def count(*arguments, **options):
        calls.append(arguments[0].shape)
        return attend(*arguments, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", count)
    query, key, value = torch.randn(3, 1, 2, 13, 8, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 4, 5, 9, 13], dtype=torch.int32)
    got, _ = attend_by_length(None, query, key, value, None, scaling=0.3, cu_seq_lens_q=ends)
    assert [tuple(shape) for shape in calls] == [(1, 2, 1, 8), (3, 2, 4, 8)]
    for start, stop in pairwise(ends.tolist()):
        part = (x[:, :, start:stop] for x in (query, key, value))
        expected = attend(*part, scale=0.3).transpose(1, 2)
        torch.testing.assert_close(got[:, start:stop], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_tower_in_bfloat16_keeps_its_frequencies(one_rank, folders, family):
    shape = ModelShape.from_folder(folders[family])
    tower = build_vision_tower(shape.vision, torch.bfloat16)
    assert {value.dtype for value in tower.parameters()} == {torch.bfloat16}
    assert {value.dtype for value in tower.buffers()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


def test_patches_are_embedded_as_by_the_convolution():
    torch.manual_seed(0)
    projection = torch.nn.Conv3d(3, 16, (2, 14, 14), stride=(2, 14, 14))
    patch_PE = torch.randn(5, 3 * 2 * 14 * 14)
    expected = projection(patch_PE.view(5, 3, 2, 14, 14)).view(5, 16)
    torch.testing.assert_close(embed_patches(projection, patch_PE), expected)
    assert embed_patches(projection.bfloat16(), patch_PE).dtype == torch.bfloat16
