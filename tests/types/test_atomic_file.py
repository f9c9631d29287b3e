"""A file has its old or its new contents, whatever moment the write ends at."""

import os

import pytest

from mega_agentrl.types.atomic_file import atomic_path, atomic_write


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("content", ["größer\n", b"\x00\xff"], ids=["text", "bytes"])
def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path, content):
    path = tmp_path / "new" / "file"
    for written in ("old", content):
        atomic_write(path, written, fsync=True)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    atomic_write(path, "old")

    def fail(*args, **kwargs):
        raise KilledError

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(KilledError):
        atomic_write(path, "new", fsync=True)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    atomic_write(path, "old")
    with pytest.raises(KilledError), atomic_path(path) as temporary:
        temporary.write_text("hal")
        assert path.read_text() == "old"
        raise KilledError
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_the_leftover_of_a_killed_process_is_overwritten(tmp_path):
    path = tmp_path / "file"
    with atomic_path(path) as temporary:
        temporary.write_text("x")
    temporary.write_text("a long leftover")
    atomic_write(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path):
    path, target = tmp_path / "file", tmp_path / "thesis.txt"
    target.write_text("dear")
    with atomic_path(path) as temporary:
        temporary.write_text("x")
    temporary.symlink_to(target)
    atomic_write(path, "new")
    assert (path.read_text(), target.read_text()) == ("new", "dear")
    assert not path.is_symlink()
