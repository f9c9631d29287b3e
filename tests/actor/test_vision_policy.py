"""A policy that sees images: steps, frozen tower, export, checkpoints, reference."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from mega_agentrl.actor.checkpoint.hf_export import convert_checkpoint_to_hf
from mega_agentrl.config.enums import Dtype
from tests.actor.checkpoint.checkpoint_jobs import call_all
from tests.actor.circles import mark_extended
from tests.parallel.merge import scores_by_row
from tests.vision_batches import load_vision_model, make_vision_batch, score_rows
from tests.vision_models import VISION_FAMILIES, make_vision_model

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")
    return {name: make_vision_model(name, root / name) for name in VISION_FAMILIES}


@pytest.fixture
def config_of(train_config, folders):
    """Return `config_of(family, **layout)` in float32 with a budget of one tree."""

    def make(family, *, freeze=False, **layout):
        config = train_config(folders[family], **layout)
        config.model.dtype, config.model.freeze_vision = Dtype.float32, freeze
        config.optim.micro_batch_tokens = 64
        return config

    return make


def logp_in_transformers(folder, batch):
    with torch.no_grad():
        return score_rows(load_vision_model(folder), folder, batch)


def is_vision(name):
    return "visual." in name


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_vl", {"tensor": 2}),
        pytest.param("qwen2_5_vl", {"tensor": 2, "data": 2}, marks=pytest.mark.extended),
        pytest.param("qwen3_vl", {"tensor": 2, "data": 2}, marks=pytest.mark.extended),
    ],
    ids=["qwen3_vl-TP2", "qwen2_5_vl-TP2-DP2", "qwen3_vl-TP2-DP2"],
)
def test_trained_weights_give_the_same_log_probs_in_transformers(
    rank_pool, config_of, folders, tmp_path, family, layout
):
    batch, config = make_vision_batch(folders[family]), config_of(family, **layout)
    calls = [
        ("load", folders[family]),
        ("steps", batch, 2),
        ("logprobs", batch),
        ("export", tmp_path / "hf"),
        ("save", tmp_path / "run/one"),
    ]
    ranks = rank_pool.run(call_all, config.parallel.world_size, config, calls)
    got_BT, _ = scores_by_row([rank[2] for rank in ranks], batch)
    expected_BT = logp_in_transformers(tmp_path / "hf", batch)
    torch.testing.assert_close(got_BT, expected_BT, rtol=0, atol=1e-4)
    exported, before = (
        load_file(f / "model.safetensors") for f in (tmp_path / "hf", folders[family])
    )
    moved = {name for name in before if not torch.equal(before[name], exported[name])}
    assert {is_vision(name) for name in moved} == {True, False}
    convert_checkpoint_to_hf(tmp_path / "run/one", folders[family], tmp_path / "converted")
    converted = load_file(tmp_path / "converted/model.safetensors")
    assert converted.keys() == exported.keys()
    assert all(torch.equal(converted[name], value) for name, value in exported.items())


@pytest.mark.parametrize(
    "dtype", mark_extended([Dtype.float32, Dtype.bfloat16], quick=[Dtype.bfloat16])
)
def test_a_frozen_tower_has_no_state_and_does_not_move(
    rank_pool, config_of, folders, tmp_path, dtype
):
    config = config_of("qwen3_vl", freeze=True, data=2)
    config.model.dtype = dtype
    folder = folders["qwen3_vl"]
    batch = make_vision_batch(folder)
    calls = [
        ("load", folder), ("values",), ("steps", batch, 1), ("values",),
        ("save", tmp_path / "run/one"),
    ]  # fmt: skip
    for _, before, _, after, _ in rank_pool.run(call_all, 2, config, calls):
        kinds = {kind for kind, name, *_ in after if is_vision(name)}
        assert kinds == {"weight"}
        weights = [
            [(name, value) for kind, name, _, value in state if kind == "weight"]
            for state in (before, after)
        ]
        for (name, old), (_, new) in zip(*weights, strict=True):
            assert not is_vision(name) or torch.equal(old, new), name
        assert any(not torch.equal(old, new) for (_, old), (_, new) in zip(*weights, strict=True))
    convert_checkpoint_to_hf(tmp_path / "run/one", folder, tmp_path / "hf", dtype=torch.float32)
    assert logp_in_transformers(tmp_path / "hf", batch).isfinite().all()
    thawed = config_of("qwen3_vl", data=2)
    thawed.model.dtype = dtype
    calls = [("load", folder), ("refused", "resume", tmp_path / "run/one")]
    for _, error in rank_pool.run(call_all, 2, thawed, calls):
        assert (error.key, error.got) == ("model.freeze_vision", False)


@pytest.mark.parametrize("family", mark_extended(VISION_FAMILIES, quick=["qwen2_5_vl"]))
def test_a_run_goes_on_from_its_checkpoint_in_another_layout(
    rank_pool, config_of, folders, tmp_path, family
):
    batch = make_vision_batch(folders[family])
    load, step = ("load", folders[family]), ("steps", batch, 1)
    calls = [load, step, ("save", tmp_path / "run/one"), step, ("logprobs", batch)]
    ranks = rank_pool.run(call_all, 2, config_of(family, data=2), calls)
    expected_BT, _ = scores_by_row([rank[4] for rank in ranks], batch)
    calls = [load, ("resume", tmp_path / "run/one"), step, ("logprobs", batch)]
    config = config_of(family, tensor=2, sequence_parallel=True)
    ranks = rank_pool.run(call_all, 2, config, calls)
    got_BT, _ = scores_by_row([rank[3] for rank in ranks], batch)
    # Adam divides by the gradient's own size: where that is near 0 the step is noise.
    error_BT = (got_BT - expected_BT).abs()
    assert error_BT.mean() < 1e-2
