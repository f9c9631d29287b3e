"""Weights exported by every layout, against the source folder and transformers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mega_agentrl.actor.checkpoint.hf_conversion import convert_checkpoint_to_hf
from mega_agentrl.actor.checkpoint.hf_export import _blocks_by_rank, _hf_names_by_stage
from mega_agentrl.config.schema import ModelConfig, ParallelConfig, TrainConfig
from mega_agentrl.reshard.mapping.model_mapping import HF_EMBEDDING, hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.actor.checkpoint.checkpoint_jobs import call_all
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


def config_of(model, **layout):
    config = TrainConfig(model=ModelConfig(path=str(model)), parallel=ParallelConfig(**layout))
    config.optim.micro_batch_tokens = 24
    return config


def tensors(folder):
    return {
        n: value for file in folder.glob("*.safetensors") for n, value in load_file(file).items()
    }


def torch_logp(folder, batch):
    """Return `[B, T]` log-probs of transformers, one unpadded row at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logp_BT = torch.zeros(batch.response_BT.shape)
    for row, prompt in enumerate(batch.prompt_ids):
        length = int(batch.length_B[row])
        response = batch.response_BT[row, :length]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response.tolist()]])).logits[0]
        logp_TV = logits[len(prompt) - 1 : -1].log_softmax(-1)
        logp_BT[row, :length] = logp_TV.gather(1, response[:, None]).squeeze(1)
    return logp_BT


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_writes_the_weights_it_has_read(name, folders, rank_pool, tmp_path):
    model = folders.get(name, folders[name.split()[0]])
    config = config_of(model, **LAYOUTS[name])
    (tmp_path / "out").mkdir()
    calls = [("load", model), ("export", tmp_path / "out/hf")]
    rank_pool.run(call_all, config.parallel.world_size, config, calls)
    got, expected = tensors(tmp_path / "out/hf"), tensors(model)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], value) for key, value in expected.items())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hf"]


@pytest.mark.parametrize("name", POLICIES)
def test_trained_weights_give_the_same_log_probs_in_transformers(
    name, folders, rank_pool, batch, tmp_path
):
    config = config_of(folders[name], tensor=2, sequence_parallel=name == "qwen3_moe")
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
    # They did move, and the checkpoint holds the same.
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


def test_an_index_names_the_file_of_each_tensor(folders, rank_pool, tmp_path, batch):
    config = config_of(folders["llama"], pipeline=2)
    calls = [("load", folders["llama"]), ("export", tmp_path / "hf")]
    rank_pool.run(call_all, 2, config, calls)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "hf" / file)
