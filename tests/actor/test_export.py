from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from mega_agentrl.actor.export import _names_by_stage, export_folder
from mega_agentrl.reshard.names import EMBEDDING, hf_shapes


def test_small_files_hold_the_same_tensors_as_the_source(one_model, checkpoints, tmp_path):
    shape, groups, model = one_model
    target = tmp_path / "out"
    parameters = dict(model.named_parameters())
    export_folder(target, checkpoints[True], shape, groups, parameters, max_file_bytes=12_000)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    got = {name: value for file in files for name, value in load_file(file).items()}
    source = load_file(checkpoints[True] / "model.safetensors")
    assert got.keys() == source.keys()
    assert all(torch.equal(got[name], source[name]) for name in source)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == source.keys()


def test_a_tied_embedding_is_written_by_the_first_stage_only(one_model):
    shape = one_model[0]
    first, last = _names_by_stage(shape, 2, 2)
    assert EMBEDDING in first
    assert EMBEDDING not in last
    assert sorted(first + last) == sorted(hf_shapes(shape))
