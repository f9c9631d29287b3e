"""Weights exported by every layout and converted from a checkpoint, against transformers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from mega_agentrl.actor.checkpoint.hf_export import (
    _blocks_by_rank,
    _hf_names_by_stage,
    convert_checkpoint_to_hf,
    plan_rounds,
)
from mega_agentrl.config.enums import Dtype
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.errors import InputError
from mega_agentrl.reshard.mapping.model_mapping import HF_EMBEDDING, hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.actor.checkpoint.checkpoint_jobs import call_all
from tests.actor.circles import mark_extended
from tests.parallel.reference import load_model, score
from tests.tiny_models import POLICIES, make_tiny_model

LAYOUTS = {
    "llama": {"tensor": 2, "pipeline": 2},
    "qwen2": {"pipeline": 2, "virtual_pipeline": 2},
    "qwen3": {"tensor": 4},
    "qwen3 tied": {"pipeline": 2, "data": 2},
    "qwen3_moe": {"tensor": 2, "data": 2, "expert": 2, "sequence_parallel": True},
    "qwen3_moe EP4": {"data": 4, "expert": 4},
    "qwen3_moe one": {},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return model folders by architecture, and one with tied embeddings."""
    root = tmp_path_factory.mktemp("models")
    tied = {"qwen3 tied": make_tiny_model("qwen3", root / "tied", tied=True)}
    return tied | {name: make_tiny_model(name, root / name) for name in POLICIES}


def tensors(folder):
    return {
        n: value for file in folder.glob("*.safetensors") for n, value in load_file(file).items()
    }


def torch_logp(folder, batch):
    """Return the `[B, T]` log-probs of transformers."""
    with torch.no_grad():
        return score(load_model(folder), batch, 1.0)[0]


@pytest.mark.parametrize("name", mark_extended(LAYOUTS, quick=["qwen2", "qwen3_moe"]))
def test_every_layout_writes_the_weights_it_has_read(
    name, folders, rank_pool, train_config, tmp_path
):
    model = folders.get(name, folders[name.split()[0]])
    config = train_config(model, **LAYOUTS[name])
    (tmp_path / "out").mkdir()
    calls = [("load", model), ("export", tmp_path / "out/hf")]
    rank_pool.run(call_all, config.parallel.world_size, config, calls)
    got, expected = tensors(tmp_path / "out/hf"), tensors(model)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], value) for key, value in expected.items())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hf"]
    if config.parallel.pipeline > 1:
        index = json.loads((tmp_path / "out/hf/model.safetensors.index.json").read_text())
        for key, file in index["weight_map"].items():
            assert key in load_file(tmp_path / "out/hf" / file)


@pytest.mark.parametrize("name", mark_extended(POLICIES, quick=["qwen3_moe"]))
def test_trained_weights_give_the_same_log_probs_in_transformers(
    name, folders, rank_pool, train_config, batch, tmp_path
):
    config = train_config(folders[name], tensor=2, sequence_parallel=name == "qwen3_moe")
    calls = [
        ("load", folders[name]),
        ("steps", batch, 1),
        ("logprobs", batch),
        ("export", tmp_path / "hf"),
        ("save", tmp_path / "run/one"),
    ]
    ranks = rank_pool.run(call_all, 2, config, calls)
    (scored,) = [rank[2] for rank in ranks if rank[2] is not None]
    got_BT = torch.empty(batch.response_BT.shape)
    got_BT[scored[0]] = scored[1]
    torch.testing.assert_close(got_BT, torch_logp(tmp_path / "hf", batch), rtol=0, atol=1e-4)
    assert all(rank[3] == [{"gradients"}, set()] for rank in ranks), (
        "their memory is free meanwhile"
    )
    # The weights have moved, and the checkpoint holds the same.
    assert (got_BT - torch_logp(folders[name], batch)).abs().max() > 1e-2
    convert_checkpoint_to_hf(tmp_path / "run/one", folders[name], tmp_path / "converted")
    exported, converted = tensors(tmp_path / "hf"), tensors(tmp_path / "converted")
    assert exported.keys() == converted.keys()
    assert all(torch.equal(converted[key], value) for key, value in exported.items())


def test_a_tied_embedding_is_written_by_the_first_stage_only(folders):
    shape = ModelShape.from_folder(folders["qwen3 tied"])
    first, last = _hf_names_by_stage(shape, ParallelConfig(pipeline=2, tensor=2))
    assert HF_EMBEDDING in first
    assert HF_EMBEDDING not in last
    assert sorted(first + last) == sorted(hf_shapes(shape))


def test_every_element_is_sent_by_one_rank_of_a_stage(folders):
    shape = ModelShape.from_folder(folders["qwen3_moe"])
    layout = ParallelConfig(data=4, expert=4)
    pieces = _blocks_by_rank(shape, layout, [0, 1, 2, 3])
    sent = dict.fromkeys(hf_shapes(shape), 0)
    for by_name in pieces.values():
        for name, found in by_name.items():
            sent[name] += sum(block.hf_rect.numel for _, block in found)
    sizes = {name: torch.Size(full).numel() for name, full in hf_shapes(shape).items()}
    assert sent == sizes
    # Data ranks repeat each other, save for their experts.
    for rank in (1, 2, 3):
        assert pieces[rank]
        assert all(f".experts.{rank}." in name for name in pieces[rank])


def test_a_round_has_one_block_of_a_rank_and_bounded_bytes(folders):
    shape = ModelShape.from_folder(folders["qwen3"])
    layout = ParallelConfig(tensor=4)
    blocks_by_rank = _blocks_by_rank(shape, layout, [0, 1, 2, 3])
    for name, full in hf_shapes(shape).items():
        blocks = {rank: by_name.get(name, []) for rank, by_name in blocks_by_rank.items()}
        num_bytes = 4 * torch.Size(full).numel()
        for max_bytes in (1, num_bytes // 2, num_bytes):
            rounds = plan_rounds(blocks, element_bytes=4, max_bytes=max_bytes)
            sizes = [sum(4 * block.hf_rect.numel for _, block in one.values()) for one in rounds]
            assert all(
                size <= max_bytes or len(one) == 1 for size, one in zip(sizes, rounds, strict=True)
            )
            sent = [(rank, block) for one in rounds for rank, block in one.items()]
            assert len(sent) == sum(map(len, blocks.values()))
            assert all(sent.count((rank, part)) == 1 for rank in blocks for part in blocks[rank])
        assert len(rounds) == max(map(len, blocks.values()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, batch, rank_pool, train_config):
    """Return (model folder, checkpoint of a bf16 run on two data ranks, weights and masters)."""
    root = tmp_path_factory.mktemp("convert")
    model = make_tiny_model("qwen3", root / "model", tied=True)
    config = train_config(model, data=2)
    config.model.dtype = Dtype.bfloat16
    calls = [("load", model), ("steps", batch, 2), ("save", root / "run/one"), ("values",)]
    ranks = rank_pool.run(call_all, 2, config, calls)
    values = {"weight": {}, "master": {}}
    for rank in ranks:
        for kind, name, rect, value in rank[3]:
            if kind in values:
                values[kind].setdefault(name, []).append((rect, value))
    return model, root / "run/one", values


@pytest.mark.parametrize(
    ("dtype", "kind", "written"),
    [
        (None, "weight", torch.bfloat16),
        (torch.bfloat16, "weight", torch.bfloat16),
        (torch.float32, "master", torch.float32),
    ],
    ids=["default", "bfloat16", "float32"],
)
def test_a_conversion_writes_weights_or_float32_masters(saved, tmp_path, dtype, kind, written):
    model, checkpoint, values = saved
    convert_checkpoint_to_hf(checkpoint, model, tmp_path / "hf", dtype=dtype)
    got = tensors(tmp_path / "hf")
    assert got.keys() == tensors(model).keys() == values[kind].keys()
    modes = {path.stat().st_mode for path in (tmp_path / "hf").iterdir()}
    assert modes == {(model / "config.json").stat().st_mode}
    for name, pieces in values[kind].items():
        assert got[name].dtype == written
        for rect, value in pieces:
            assert torch.equal(got[name][rect.slices], value), name


def test_many_small_files_hold_the_same_as_one(saved, tmp_path):
    model, checkpoint, _ = saved
    convert_checkpoint_to_hf(checkpoint, model, tmp_path / "one")
    convert_checkpoint_to_hf(checkpoint, model, tmp_path / "many", max_file_bytes=12_000)
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert all(torch.equal(many[name], value) for name, value in one.items())
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == one.keys() == many.keys()


def test_a_checkpoint_of_another_model_is_refused(saved, tmp_path):
    model, checkpoint, _ = saved
    other = make_tiny_model("qwen3", tmp_path / "other", tied=False)
    with pytest.raises(InputError) as caught:
        convert_checkpoint_to_hf(checkpoint, other, tmp_path / "hf")
    assert caught.value.got == {"tie_word_embeddings": True}
    with pytest.raises(InputError) as caught:
        convert_checkpoint_to_hf(model, model, tmp_path / "hf")
    assert caught.value.name == str(model / "manifest.json")
    assert not (tmp_path / "hf").exists()
