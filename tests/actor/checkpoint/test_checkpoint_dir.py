"""Checkpoint folders: written whole or not at all, found, checked and pruned."""

from __future__ import annotations

import json
import os

import pytest

from mega_agentrl.actor.checkpoint import checkpoint_dir
from mega_agentrl.actor.checkpoint.checkpoint_dir import (
    CheckpointManifest,
    CheckpointVersionError,
    FileRecord,
    commit_folder,
    create_partial_folder,
    find_damage,
    latest_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    to_json_dict,
)
from mega_agentrl.errors import InputError


def manifest_of(folder, number=1, **extra):
    files = {path.name: FileRecord.from_file(path) for path in folder.iterdir()}
    return CheckpointManifest(
        number=number,
        num_steps=7,
        num_adam_steps=5,
        num_ranks=2,
        layout={"tensor": 2},
        dtype="bfloat16",
        shape={"hidden": 32},
        files=files,
        extra=extra,
    )


def write(folder, number=1, **extra):
    """Write a small checkpoint with the same steps as a real one."""
    partial = create_partial_folder(folder, f"token{number}")
    (partial / "metadata.json").write_text("{}")
    (partial / "data").write_bytes(bytes(100) + bytes([number]))
    commit_folder(partial, folder, manifest_of(partial, number, **extra))
    return folder


def test_a_manifest_reads_back_as_it_was_written(tmp_path):
    folder = write(tmp_path / "a", seed=3, ids=["x"])
    manifest = CheckpointManifest.read(folder)
    assert manifest.extra == {"seed": 3, "ids": ["x"]}
    assert (manifest.num_steps, manifest.num_adam_steps, manifest.dtype) == (7, 5, "bfloat16")
    assert manifest.files["data"].num_bytes == 101
    assert find_damage(folder, manifest, manifest.files, contents=True) is None
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_newest_whole_checkpoint_is_the_latest(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    write(tmp_path / "b", 1)
    write(tmp_path / "a", 2)
    assert latest_checkpoint(tmp_path) == tmp_path / "a"
    with (tmp_path / "a/data").open("r+b") as file:
        file.truncate(50)
    assert latest_checkpoint(tmp_path) == tmp_path / "b"
    (tmp_path / "b/manifest.json").write_text('{"format"')
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("moment", ["begin", "write", "rename", "manifest"])
def test_a_save_ended_at_any_moment_leaves_the_previous_checkpoint(tmp_path, moment, monkeypatch):
    first = write(tmp_path / "first", 1)
    before = {path.name: path.read_bytes() for path in first.iterdir()}

    def stop(*_):
        raise KeyboardInterrupt

    if moment == "begin":
        create_partial_folder(tmp_path / "second", "x")
    else:
        broken = {"write": (os, "fsync"), "rename": (type(tmp_path), "rename")}
        target = broken.get(moment, (CheckpointManifest, "write"))
        monkeypatch.setattr(*target, stop)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "second", 2)
        monkeypatch.undo()
    assert latest_checkpoint(tmp_path) == first
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
    # The same name can be used again, whatever is left of it.
    second = write(tmp_path / "second", 2)
    assert latest_checkpoint(tmp_path) == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_digests_find_other_contents_of_the_same_size(tmp_path):
    folder = write(tmp_path / "a")
    manifest = CheckpointManifest.read(folder)
    (folder / "data").write_bytes(bytes(99) + b"zz")
    assert find_damage(folder, manifest, ["data"], contents=False) is None
    damage = find_damage(folder, manifest, ["data"], contents=True)
    assert damage.expected == manifest.files["data"].sha256 != damage.got
    (folder / "data").unlink()
    assert find_damage(folder, manifest, ["data"], contents=False).got is None


def test_a_file_that_lost_bytes_before_the_rename_stops_the_save(tmp_path):
    partial = create_partial_folder(tmp_path / "a", "x")
    (partial / "data").write_bytes(bytes(100))
    manifest = manifest_of(partial)
    (partial / "data").write_bytes(bytes(60))
    with pytest.raises(InputError) as caught:
        commit_folder(partial, tmp_path / "a", manifest)
    assert (caught.value.got, caught.value.expected) == (60, "100")
    assert not (tmp_path / "a").exists()


def test_an_existing_folder_is_not_replaced(tmp_path):
    write(tmp_path / "a")
    with pytest.raises(InputError) as caught:
        create_partial_folder(tmp_path / "a", "x")
    assert caught.value.got == "a finished checkpoint"
    (tmp_path / "b").mkdir()
    (tmp_path / "b/thesis.txt").write_text("dear")
    with pytest.raises(InputError) as caught:
        create_partial_folder(tmp_path / "b", "x")
    assert caught.value.got == "other files"
    with pytest.raises(InputError) as caught:
        CheckpointManifest.read(tmp_path / "b")
    assert (caught.value.name, caught.value.got) == (str(tmp_path / "b/manifest.json"), None)


def test_another_format_is_refused(tmp_path):
    folder = write(tmp_path / "a")
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace(checkpoint_dir.MANIFEST_FORMAT, "other 2"))
    with pytest.raises(InputError) as caught:
        CheckpointManifest.read(folder)
    assert caught.value.got == "other 2"
    assert list_checkpoints(tmp_path) == []


def test_a_checkpoint_of_an_earlier_version_is_not_taken_for_a_damaged_one(tmp_path):
    folder = write(tmp_path / "a")
    text = (folder / "manifest.json").read_text()
    earlier = "mega_agentrl checkpoint 2"
    (folder / "manifest.json").write_text(text.replace(checkpoint_dir.MANIFEST_FORMAT, earlier))
    with pytest.raises(CheckpointVersionError) as caught:
        list_checkpoints(tmp_path)
    assert (caught.value.got, caught.value.expected) == (earlier, repr("mega_agentrl checkpoint 3"))


def changed(*places, value):
    """A function that sets the value at a place of a manifest."""

    def change(values):
        *outer, last = places
        for place in outer:
            values = values[place]
        values[last] = value

    return change


NO_FILE = {"num_bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.pop("num_steps"),
        changed("color", value="red"),
        changed("files", value={"data": {"sha256": "0" * 64}}),
        changed("number", value="a"),
        changed("number", value=float("nan")),
        changed("number", value=-1),
        changed("number", value=10**400),
        changed("number", value=None),
        changed("num_ranks", value=1e300),
        changed("dtype", value="load"),
        changed("shape", value=[1]),
        changed("extra", value="x"),
        changed("files", "../../etc/passwd", value=NO_FILE),
        changed("files", "/etc/passwd", value=NO_FILE),
        changed("files", "a/b", value=NO_FILE),
        changed("files", "..", value=NO_FILE),
        changed("files", "", value=NO_FILE),
        changed("files", "a\0b", value=NO_FILE),
        changed("files", "n" * 300, value=NO_FILE),
        changed("files", "data", "num_bytes", value=-1),
        changed("files", "data", "sha256", value="../x"),
    ],
)
def test_a_manifest_with_other_values_is_refused(tmp_path, change):
    folder = write(tmp_path / "a")
    values = json.loads((folder / "manifest.json").read_text())
    change(values)
    (folder / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(InputError) as caught:
        CheckpointManifest.read(folder)
    assert caught.value.name == str(folder / "manifest.json")
    write(tmp_path / "b", 2)
    assert latest_checkpoint(tmp_path) == tmp_path / "b"
    assert prune_checkpoints(tmp_path, 1) == []


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": "x", "format": "y"}', bytes(64)],
    ids=["empty", "a list", "no UTF-8", "depth", "a key twice", "zeros"],
)
def test_a_manifest_that_is_no_object_is_refused(tmp_path, text):
    folder = write(tmp_path / "a")
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(InputError):
        CheckpointManifest.read(folder)
    assert latest_checkpoint(tmp_path) is None


def test_pruning_keeps_the_newest_and_removes_leftovers(tmp_path):
    for number, name in enumerate(("c", "a", "b", "d"), start=1):
        write(tmp_path / name, number)
    create_partial_folder(tmp_path / "e", "x")
    (tmp_path / "notes").mkdir()
    with pytest.raises(InputError) as caught:
        prune_checkpoints(tmp_path, 0)
    assert (caught.value.name, caught.value.got) == ("keep", 0)
    prune_checkpoints(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "d", "notes"]
    assert checkpoint_dir.next_checkpoint_number(tmp_path) == 5
    prune_checkpoints(tmp_path, 5)
    assert latest_checkpoint(tmp_path) == tmp_path / "d"


def test_extra_values_must_be_plain():
    assert to_json_dict({"a": (1, 2)}, "extra") == {"a": [1, 2]}
    with pytest.raises(InputError) as caught:
        to_json_dict({"a": {1}}, "extra")
    assert caught.value.name == "extra"


def test_an_old_checkpoint_that_was_moved_away_loses_only_its_link(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "cheaper disk"
    elsewhere.mkdir()
    write(run / "a", 1).rename(elsewhere / "a")
    (run / "a").symlink_to(elsewhere / "a")
    before = sorted(path.name for path in (elsewhere / "a").iterdir())
    write(run / "b", 2)
    assert prune_checkpoints(run, 1) == [run / "a"]
    assert [path.name for path in run.iterdir()] == ["b"]
    assert sorted(path.name for path in (elsewhere / "a").iterdir()) == before
    assert latest_checkpoint(elsewhere) == elsewhere / "a"


def test_links_and_files_with_the_names_of_leftovers_do_not_stop_a_save(tmp_path):
    run, target = tmp_path / "run", tmp_path / "papers"
    target.mkdir()
    (target / "thesis.txt").write_text("dear")
    write(run / "a", 1)
    (run / "b.partial-1").symlink_to(target)
    (run / "b.partial-2").symlink_to(tmp_path / "nowhere")
    (run / "b.partial-3").write_text("notes")
    (run / "c.partial-4").symlink_to(target / "thesis.txt")
    write(run / "b", 2)
    prune_checkpoints(run, 1)
    assert sorted(path.name for path in run.iterdir()) == ["b", "b.partial-3"]
    assert (target / "thesis.txt").read_text() == "dear"


def test_a_link_in_the_place_of_an_interrupted_save_is_replaced_and_its_target_stays(tmp_path):
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "metadata.json").write_text("{}")
    run = tmp_path / "run"
    run.mkdir()
    for name, place in (("a", target), ("b", tmp_path / "nowhere")):
        (run / name).symlink_to(place)
        write(run / name)
        assert not (run / name).is_symlink()
    assert (target / "metadata.json").read_text() == "{}"
    (run / "c").symlink_to(target)
    checkpoint_dir.invalidate_checkpoint(run / "c")
    assert [path.name for path in target.iterdir()] == ["metadata.json"]


def test_a_folder_that_cannot_be_removed_stays_with_a_line(tmp_path, monkeypatch, caplog):
    for number, name in enumerate("abc", start=1):
        write(tmp_path / name, number)
    rmtree = checkpoint_dir.shutil.rmtree

    def fail(path):
        if path.name == "a":
            raise PermissionError(13, "Permission denied", str(path))
        rmtree(path)

    monkeypatch.setattr(checkpoint_dir.shutil, "rmtree", fail)
    assert prune_checkpoints(tmp_path, 1) == [tmp_path / "b"]
    assert len(caplog.records) == 1
    assert latest_checkpoint(tmp_path) == tmp_path / "c"
