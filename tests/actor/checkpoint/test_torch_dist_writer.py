"""Files of several ranks, written one after the other in one process."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mega_agentrl.actor.checkpoint.checkpoint_dir import FileRecord
from mega_agentrl.actor.checkpoint.torch_dist_writer import finalize_checkpoint, write_rank_file
from mega_agentrl.errors import InputError


def piece(key, value, full, offset):
    return ShardedTensor(
        key=key,
        data=value,
        dtype=value.dtype,
        local_shape=tuple(value.shape),
        global_shape=full,
        global_offset=offset,
        axis_fragmentations=None,
    )


@pytest.fixture
def write(one_rank, tmp_path):
    """Return `write(rank, (key, value, full shape, offset)...)`, which writes to `tmp_path`.

    `write.records` has the records of the files.
    """
    records = {}

    def make(rank, *pieces):
        state = {str(number): piece(*one) for number, one in enumerate(pieces)}
        records.update(write_rank_file(state, tmp_path, rank))
        return tmp_path

    make.records = records
    return make


WHOLE = torch.arange(20.0).view(4, 5)


def test_uneven_pieces_of_two_ranks_become_one_tensor(write):
    write(0, ("a", WHOLE[:1], (4, 5), (0, 0)), ("a", WHOLE[1:, :2], (4, 5), (1, 0)))
    folder = write(1, ("b", torch.ones(3), (3,), (0,)), ("a", WHOLE[1:, 2:], (4, 5), (1, 2)))
    files = write.records | finalize_checkpoint(folder, 2, {"a": (4, 5), "b": (3,)})
    assert set(files) == {path.name for path in folder.iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json"} == set(files)
    # The digests of what was written are those of the files.
    assert all(record == FileRecord.from_file(folder / name) for name, record in files.items())
    state = {"a": torch.empty(4, 5), "b": torch.empty(3)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["a"], WHOLE)
    assert torch.equal(state["b"], torch.ones(3))


def test_the_error_of_a_write_ends_the_writing_and_is_the_one_that_is_raised(one_rank, tmp_path):
    state, writes = {"0": piece("a", WHOLE, (4, 5), (0, 0))}, iter(range(2))

    def fail_at_third_write():
        if next(writes, None) is None:
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_rank_file(state, tmp_path, 0, fail_at_third_write)
    assert not list(tmp_path.glob("*report*"))


def test_megatron_reads_what_was_written(write):
    folder = write(0, ("a", WHOLE, (4, 5), (0, 0)))
    finalize_checkpoint(folder, 1, {"a": (4, 5)})
    state = {"0": piece("a", torch.zeros(4, 5), (4, 5), (0, 0))}
    assert torch.equal(dist_checkpointing.load(state, str(folder))["0"], WHOLE)


def test_a_hole_is_an_error(write):
    folder = write(0, ("a", WHOLE[:2], (4, 5), (0, 0)))
    with pytest.raises(AssertionError, match=r"'a': \(10, 20\)"):
        finalize_checkpoint(folder, 1, {"a": (4, 5)})


def test_a_tensor_that_nobody_writes_or_knows_is_an_error(write):
    folder = write(0, ("a", WHOLE, (4, 5), (0, 0)))
    with pytest.raises(AssertionError, match=r"'b': \(0, 3\)"):
        finalize_checkpoint(folder, 1, {"a": (4, 5), "b": (3,)})
    with pytest.raises(AssertionError, match=r"'a': \(20, 0\)"):
        finalize_checkpoint(folder, 1, {})


def test_pieces_that_overlap_are_an_error(write):
    write(0, ("a", WHOLE[:3], (4, 5), (0, 0)))
    folder = write(1, ("a", WHOLE[2:], (4, 5), (2, 0)))
    with pytest.raises(ValueError, match="Failed to validate global plan"):
        finalize_checkpoint(folder, 2, {"a": (4, 5)})


def test_a_file_that_is_too_short_is_an_error(write):
    folder = write(0, ("a", WHOLE, (4, 5), (0, 0)))
    report = folder / "__0_report.pickle"
    found = pickle.loads(report.read_bytes())
    record = found.files["__0_0.distcp"]
    object.__setattr__(record, "num_bytes", record.num_bytes - 1)
    report.write_bytes(pickle.dumps(found))
    with pytest.raises(InputError) as caught:
        finalize_checkpoint(folder, 1, {"a": (4, 5)})
    assert caught.value.expected == f"at most {record.num_bytes}"


class Planted:
    def __reduce__(self):
        return os.system, ("exit",)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(pickle.dumps(Planted()), id="code"),
        pytest.param(pickle.dumps(torch.float32), id="another_value"),
        pytest.param(b"", id="empty"),
    ],
)
def test_a_report_that_is_something_else_is_refused_and_calls_nothing(write, monkeypatch, content):
    folder = write(0, ("a", WHOLE, (4, 5), (0, 0)))
    report = folder / "__0_report.pickle"
    report.write_bytes(content)
    monkeypatch.setattr(os, "system", lambda _: pytest.fail("it was called"))
    with pytest.raises(InputError) as caught:
        finalize_checkpoint(folder, 1, {"a": (4, 5)})
    assert (caught.value.name, caught.value.expected) == (
        f"report {report}",
        "the report of a rank",
    )
