"""A journal loses only what follows its last whole record, wherever it is cut or damaged."""

import os

import pytest

from mega_agentrl.errors import InputError
from mega_agentrl.types.journal import Journal

BODIES = [b"first", b"", b"third" * 100]


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "folder" / "journal.bin")
    for body in BODIES:
        journal.append(body)
    return journal


def bodies_of(journal):
    return [body for _, body in journal.recover()]


def test_records_are_read_at_the_offsets_they_were_written_at(journal):
    offset = journal.append(b"last", fsync=True)
    records = list(Journal(journal.path).recover())
    assert [body for _, body in records] == [*BODIES, b"last"]
    assert records[-1] == (offset, b"last")
    assert [journal.read(at) for at, _ in records] == [*BODIES, b"last"]


def test_a_missing_file_is_an_empty_journal(tmp_path):
    assert bodies_of(Journal(tmp_path / "none")) == []
    assert not (tmp_path / "none").exists()


def test_a_journal_cut_anywhere_keeps_its_whole_records_and_goes_on(journal):
    whole = journal.path.read_bytes()
    offsets = [offset for offset, _ in journal.recover()]
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
    start = [offset for offset, _ in journal.recover()][2]
    journal.append(b"last")
    data = bytearray(journal.path.read_bytes())
    data[start + at] ^= 0x10
    journal.path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        journal.read(start)
    assert caught.value.name == f"{journal.path}, offset {start}"
    assert bodies_of(journal) == BODIES[:2]
    assert journal.path.stat().st_size == start


def test_a_rewrite_may_read_the_old_records_and_is_atomic(journal, monkeypatch):
    offsets = [offset for offset, _ in journal.recover()]
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
