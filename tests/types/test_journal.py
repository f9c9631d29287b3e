"""A journal loses only what follows its last whole record, wherever it is cut or damaged."""

import os

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.types.journal import Journal

BODIES = [b"first", b"2", b"third" * 100]


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "folder" / "journal.bin")
    for body in BODIES:
        journal.append(body)
    return journal


def bodies_of(journal):
    return [body for _, body in journal.recover(bytes)]


def test_records_are_read_at_the_offsets_they_were_written_at(journal):
    offset = journal.append(b"last", fsync=True)
    records = list(Journal(journal.path).recover(bytes))
    assert [body for _, body in records] == [*BODIES, b"last"]
    assert records[-1] == (offset, b"last")
    assert [journal.read(at) for at, _ in records] == [*BODIES, b"last"]


def test_a_missing_file_is_an_empty_journal(tmp_path):
    assert bodies_of(Journal(tmp_path / "none")) == []
    assert not (tmp_path / "none").exists()


def test_a_journal_cut_anywhere_keeps_its_whole_records_and_goes_on(journal):
    whole = journal.path.read_bytes()
    offsets = [offset for offset, _ in journal.recover(bytes)]
    ends = [*offsets[1:], len(whole)]
    for size in range(len(whole) + 1):
        journal.path.write_bytes(whole[:size])
        num_whole = sum(end <= size for end in ends)
        assert bodies_of(journal) == BODIES[:num_whole]
        assert journal.path.stat().st_size == [*offsets, len(whole)][num_whole]
        for body in BODIES[num_whole:]:
            journal.append(body)
        assert journal.path.read_bytes() == whole


@pytest.mark.parametrize("at", [3, 9, 17], ids=["length", "checksum", "body"])
def test_a_damaged_record_is_cut_off_with_all_behind_it(journal, at):
    start = [offset for offset, _ in journal.recover(bytes)][2]
    journal.append(b"last")
    data = bytearray(journal.path.read_bytes())
    data[start + at] ^= 0x10
    journal.path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        journal.read(start)
    assert caught.value.name == f"{journal.path}, offset {start}"
    assert bodies_of(journal) == BODIES[:2]
    assert journal.path.stat().st_size == start


@pytest.mark.parametrize("num_bytes", [1, 16, 17, 4096], ids=["one", "header", "more", "page"])
def test_zeros_at_the_end_are_cut_off_with_one_line(journal, num_bytes, caplog):
    """A machine that lost power leaves them; the checksum of an empty record is 0, too."""
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole + bytes(num_bytes))
    assert bodies_of(journal) == BODIES
    assert journal.path.read_bytes() == whole
    assert len(caplog.records) == 1
    assert str(num_bytes) in caplog.text


def test_a_whole_journal_is_read_without_a_warning(journal, caplog):
    assert bodies_of(journal) == BODIES
    assert not caplog.records


def test_a_record_that_its_reader_refuses_ends_the_journal(journal, caplog):
    def decode(body):
        if body == BODIES[1]:
            raise InputError("a record", body, "another one")
        return body

    assert [body for _, body in journal.recover(decode)] == BODIES[:1]
    assert bodies_of(journal) == BODIES[:1]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_a_journal_that_is_no_file_is_empty_and_its_target_unchanged(tmp_path, kind, caplog):
    path, target = tmp_path / "journal.bin", tmp_path / "thesis.txt"
    target.write_bytes(b"dear" * 10)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target if kind == "link" else tmp_path / "nowhere")
    journal = Journal(path)
    assert bodies_of(journal) == []
    assert len(caplog.records) == 1
    journal.append(b"own")
    assert bodies_of(journal) == [b"own"]
    assert target.read_bytes() == b"dear" * 10
    assert not (tmp_path / "nowhere").exists()


def test_a_rewrite_may_read_the_old_records_and_is_atomic(journal, monkeypatch):
    offsets = [offset for offset, _ in journal.recover(bytes)]
    new = journal.rewrite((journal.read(offset) for offset in offsets[1:]), fsync=True)
    assert [journal.read(offset) for offset in new] == bodies_of(journal) == BODIES[1:]

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        journal.rewrite([b"other"])
    monkeypatch.undo()
    assert bodies_of(journal) == BODIES[1:]
    assert list(journal.path.parent.iterdir()) == [journal.path]
