from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from mega_agentrl.actor.checkpoint.hf_conversion import convert_checkpoint_to_hf
from mega_agentrl.config.enums import Dtype
from mega_agentrl.config.schema import ModelConfig, ParallelConfig, TrainConfig
from tests.actor.checkpoint.checkpoint_jobs import call_all
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory, batch, rank_pool):
    """Return (model folder, checkpoint of a bf16 run on two data ranks, weights and masters)."""
    root = tmp_path_factory.mktemp("convert")
    model = make_tiny_model("qwen3", root / "model", tied=True)
    config = TrainConfig(model=ModelConfig(path=str(model), dtype=Dtype.bfloat16))
    config.parallel = ParallelConfig(data=2)
    calls = [("load", model), ("steps", batch, 2), ("save", root / "run/one"), ("values",)]
    ranks = rank_pool.run(call_all, 2, config, calls)
    values = {"weight": {}, "master": {}}
    for rank in ranks:
        for kind, name, rect, value in rank[3]:
            if kind in values:
                values[kind].setdefault(name, []).append((rect, value))
    return model, root / "run/one", values


def tensors(folder):
    return {
        n: value for file in folder.glob("*.safetensors") for n, value in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("dtype", "kind", "written"),
    [
        (None, "weight", torch.bfloat16),
        (torch.bfloat16, "weight", torch.bfloat16),
        (torch.float32, "master", torch.float32),
    ],
)
def test_weights_or_masters_are_written(saved, tmp_path, dtype, kind, written):
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


def test_small_files_hold_the_same(saved, tmp_path):
    model, checkpoint, _ = saved
    convert_checkpoint_to_hf(checkpoint, model, tmp_path / "one")
    convert_checkpoint_to_hf(checkpoint, model, tmp_path / "many", max_file_bytes=12_000)
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert all(torch.equal(many[name], value) for name, value in one.items())
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == one.keys() == many.keys()


def test_what_does_not_fit_is_refused(saved, tmp_path):
    model, checkpoint, _ = saved
    other = make_tiny_model("qwen3", tmp_path / "other", tied=False)
    with pytest.raises(ValueError, match="another model's folder"):
        convert_checkpoint_to_hf(checkpoint, other, tmp_path / "hf")
    with pytest.raises(ValueError, match=r"expected manifest\.json"):
        convert_checkpoint_to_hf(model, model, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
