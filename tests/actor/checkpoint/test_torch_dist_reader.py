"""A checkpoint is read as data: its metadata is checked, and no code of it runs."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from mega_agentrl.actor.checkpoint.torch_dist_reader import (
    METADATA_FILE,
    read_metadata,
    read_sharded_state,
    read_tensors,
)
from mega_agentrl.actor.checkpoint.torch_dist_writer import finalize_checkpoint, write_rank_file
from mega_agentrl.errors import InputError

WHOLE = torch.arange(20.0).view(4, 5)


class Command:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def sharded(value):
    tensor = ShardedTensor(
        key="a",
        data=value,
        dtype=value.dtype,
        local_shape=tuple(value.shape),
        global_shape=tuple(value.shape),
        global_offset=(0, 0),
        axis_fragmentations=None,
    )
    return {"0": tensor, "rng": ShardedObject("rng", {"cpu": torch.get_rng_state()}, (1,), (0,))}


@pytest.fixture
def folder(one_rank, tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    write_rank_file(sharded(WHOLE), path, 0)
    finalize_checkpoint(path, 1, {"a": (4, 5)})
    return path


def change_metadata(folder, change):
    path = folder / METADATA_FILE
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def change_part(**values):
    """A function that changes where the bytes of the tensor are."""

    def change(metadata):
        index = next(one for one in metadata.storage_data if one.fqn == "a")
        metadata.storage_data[index] = replace(metadata.storage_data[index], **values)

    return change


def test_tensors_and_objects_are_read(folder):
    state = sharded(torch.zeros(4, 5))
    objects = read_sharded_state(state, folder)
    assert torch.equal(state["0"].data, WHOLE)
    assert torch.equal(objects["rng"]["cpu"], torch.get_rng_state())
    whole = {"a": torch.zeros(4, 5)}
    read_tensors(whole, folder)
    assert torch.equal(whole["a"], WHOLE)


def test_files_that_hold_nothing_of_a_run_are_not_read(folder, tmp_path):
    for name in ("metadata.json", "__0.metadata"):
        (folder / name).write_bytes(pickle.dumps(Command(tmp_path / "ran")))
    read_sharded_state(sharded(torch.zeros(4, 5)), folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["whole", "field", "key", "local"])
def test_metadata_that_would_run_a_command_is_refused(folder, tmp_path, place):
    command, path = Command(tmp_path / "ran"), folder / METADATA_FILE
    if place == "whole":
        path.write_bytes(pickle.dumps(command))
    elif place == "field":
        change_metadata(folder, lambda metadata: setattr(metadata, "planner_data", command))
    elif place == "key":
        change_metadata(folder, lambda metadata: metadata.storage_data.update({command: 1}))
    else:
        (folder / "__0.metadata").write_bytes(pickle.dumps(command))
        path.write_bytes(b"")
    with pytest.raises(InputError) as caught:
        read_sharded_state(sharded(torch.zeros(4, 5)), folder)
    assert caught.value.name == str(path)
    with pytest.raises(InputError):
        read_tensors({"a": torch.zeros(4, 5)}, folder)
    assert not (tmp_path / "ran").exists()


def stored_object(folder, value):
    """Put an object that torch saves with pickle behind the data; return its place."""
    file = io.BytesIO()
    torch.save(value, file)
    path = folder / "__0_0.distcp"
    offset = path.stat().st_size
    with path.open("ab") as end:
        end.write(file.getvalue())
    return _StorageInfo("__0_0.distcp", offset, len(file.getvalue()))


@pytest.mark.parametrize("key", ["rng/shard_0_1", "a"], ids=["object", "tensor"])
def test_an_object_that_would_run_a_command_is_refused(folder, tmp_path, key):
    place = stored_object(folder, [Command(tmp_path / "ran")])

    def change(metadata):
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        for index in [one for one in metadata.storage_data if one.fqn == key]:
            del metadata.storage_data[index]
        metadata.storage_data[MetadataIndex(key)] = place

    change_metadata(folder, change)
    with pytest.raises((RuntimeError, InputError)):
        read_sharded_state(sharded(torch.zeros(4, 5)), folder)
    if key == "a":
        with pytest.raises(RuntimeError):
            read_tensors({"a": torch.zeros(4, 5)}, folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        change_part(relative_path="../outside"),
        change_part(relative_path="/etc/passwd"),
        change_part(relative_path="link"),
        change_part(relative_path=3),
        change_part(offset=-1),
        change_part(offset=2**62, length=2**62),
        change_part(length=10**9),
        change_part(length=True),
        change_part(transform_descriptors=("stream.zstd",)),
        lambda metadata: setattr(metadata.state_dict_metadata["a"], "size", (4, -5)),
        lambda metadata: setattr(metadata.state_dict_metadata["a"].chunks[0], "sizes", (9, 9)),
        lambda metadata: setattr(metadata.state_dict_metadata["a"].properties, "dtype", "x"),
        lambda metadata: setattr(metadata, "storage_data", None),
        lambda metadata: setattr(metadata, "state_dict_metadata", {"a": 1}),
    ],
)
def test_metadata_of_other_files_or_parts_is_refused(folder, change):
    (folder.parent / "outside").write_bytes(bytes(10_000))
    (folder / "link").symlink_to(folder.parent / "outside")
    change_metadata(folder, change)
    with pytest.raises(InputError):
        read_metadata(folder)


def test_the_file_cannot_change_a_class_for_later_readings(folder):
    """`BUILD` on a class sets attributes of it: here of a class of that reading alone."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (folder / "other").mkdir()
    state = b"(N}(Vfields\nN\x75t"
    (folder / "other" / METADATA_FILE).write_bytes(b"\x80\x02" + name + state + b"b.")
    with pytest.raises(InputError):
        read_metadata(folder / "other")
    assert read_metadata(folder).state_dict_metadata["a"].size == (4, 5)


def test_a_tensor_of_another_shape_or_name_is_refused(folder):
    with pytest.raises(RuntimeError):
        read_tensors({"a": torch.zeros(5, 4)}, folder)
    with pytest.raises(RuntimeError):
        read_tensors({"b": torch.zeros(4, 5)}, folder)
