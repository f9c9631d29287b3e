"""Checkpoint folders: a rank reads only its rectangles, and an export is complete or absent."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.errors import InputError
from mega_agentrl.reshard import hf_checkpoint as checkpoint
from mega_agentrl.reshard.hf_checkpoint import (
    begin_export,
    find_tensor_files,
    finish_export,
    partial_export_folder,
    plan_files,
    read_shards,
)
from mega_agentrl.reshard.layout import Block, Rect, ShardLayout

SHAPES = {"a": (4, 3), "b": (2,)}
TENSORS = {"a": torch.arange(12.0).view(4, 3), "b": torch.tensor([7.0, 8.0])}
SHARDS = [
    # Rows 2..3 of a under one row of padding's place, and all of b.
    ShardLayout("left", (3, 3), (Block("a", Rect((2, 0), (4, 3)), Rect((0, 0), (2, 3))),)),
    ShardLayout("right", (2,), (Block("b", Rect.whole((2,)), Rect.whole((2,))),)),
]


def parameters():
    return {"left": torch.full((3, 3), 9.0), "right": torch.zeros(2)}


def test_reads_only_its_rectangles_and_zeroes_the_padding(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    got = parameters()
    read_shards(tmp_path, SHARDS, SHAPES, got)
    assert got["left"].tolist() == [[6, 7, 8], [9, 10, 11], [0, 0, 0]]
    assert got["right"].tolist() == [7, 8]


def test_every_file_of_an_index_is_opened_once_and_missing_ones_are_named(tmp_path, monkeypatch):
    for name in TENSORS:
        save_file({name: TENSORS[name]}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in TENSORS}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = []
    plain = checkpoint.safe_open
    monkeypatch.setattr(
        checkpoint, "safe_open", lambda path, **kw: opened.append(path) or plain(path, **kw)
    )
    got = parameters()
    read_shards(tmp_path, SHARDS * 2, SHAPES, got)
    assert len(opened) == 2
    assert got["left"][0].tolist() == [6, 7, 8]
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(InputError) as caught:
        find_tensor_files(tmp_path)
    assert caught.value.got == ["b.safetensors"]


@pytest.mark.parametrize(
    ("shapes", "got"),
    [
        (SHAPES, {"unknown tensors": ["c"], "missing tensors": []}),
        (
            SHAPES | {"c": (1,), "d": (1,)},
            {"unknown tensors": [], "missing tensors": ["d"]},
        ),
        (SHAPES | {"c": (1,), "a": (5, 3)}, (4, 3)),
    ],
    ids=["unknown", "missing", "misshapen"],
)
def test_tensors_that_are_not_those_of_the_model_are_named(tmp_path, shapes, got):
    save_file({**TENSORS, "c": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError) as caught:
        read_shards(tmp_path, SHARDS, shapes, parameters())
    assert caught.value.got == got


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "model.layers.1.self_attn.rotary_emb.inv_freq"],
    ids=["tied-output-layer", "rotary-frequencies"],
)
def test_tensors_that_follow_from_others_may_be_in_a_checkpoint(tmp_path, name):
    save_file({**TENSORS, name: torch.zeros(1)}, tmp_path / "model.safetensors")
    read_shards(tmp_path, SHARDS, SHAPES, parameters())


def test_a_fresh_tensor_keeps_its_values_only_where_the_folder_lacks_it(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    got = parameters() | {"right": torch.tensor([3.0, 4.0])}
    with pytest.raises(InputError) as caught:
        read_shards(tmp_path, SHARDS, SHAPES, got)
    assert caught.value.got == {"unknown tensors": [], "missing tensors": ["b"]}
    read_shards(tmp_path, SHARDS, SHAPES, got, fresh=("b",))
    assert got["right"].tolist() == [3, 4]
    assert got["left"][0].tolist() == [6, 7, 8]
    save_file(TENSORS, tmp_path / "model.safetensors")
    read_shards(tmp_path, SHARDS, SHAPES, got, fresh=("b",))
    assert got["right"].tolist() == [7, 8]


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        find_tensor_files(tmp_path)
    assert (caught.value.key, caught.value.got) == ("model.path", tmp_path)


def test_files_hold_one_stage_and_at_most_the_limit():
    shapes = {"a": (10,), "b": (10,), "c": (30,), "d": (5,)}
    plan = plan_files([["a", "b", "c"], ["d"]], shapes, element_bytes=4, max_file_bytes=80)
    assert [(file.stage, file.tensors) for file in plan] == [
        (0, ("a", "b")),
        (0, ("c",)),
        (1, ("d",)),
    ]
    assert plan[1].name == "model-00002-of-00003.safetensors"
    (only,) = plan_files([["a", "b"]], shapes, element_bytes=4, max_file_bytes=80)
    assert only.name == "model.safetensors"


def test_an_export_copies_the_rest_and_takes_its_name_last(tmp_path):
    source, target = tmp_path / "source", tmp_path / "runs" / "final"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin"):
        (source / name).write_text("{}")
    plan = plan_files([["a"], ["b"]], SHAPES, element_bytes=4, max_file_bytes=1000)
    for _ in range(2):  # the second one replaces the first
        begin_export(target, source)
        built = partial_export_folder(target)
        assert {file.name for file in built.iterdir()} == {"config.json", "tokenizer.json"}
        finish_export(target, plan, SHAPES, element_bytes=4)
    assert not built.exists()
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (12 + 2)
    assert index["weight_map"]["b"] == "model-00002-of-00002.safetensors"


def test_an_export_never_replaces_something_else(tmp_path):
    (tmp_path / "notes").mkdir()
    with pytest.raises(InputError) as caught:
        begin_export(tmp_path / "notes", tmp_path)
    assert str(tmp_path / "notes") in caught.value.name
