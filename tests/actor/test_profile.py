"""Traces hold what was done between two calls, and nothing else."""

import json

import pytest
import torch

from mega_agentrl.actor.profile import StepProfile


def names(file):
    return {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}


def test_what_was_done_in_between_is_in_the_trace(tmp_path):
    trace, file = StepProfile(), tmp_path / "profile" / "step-3-rank0.json"
    one = torch.ones(8, 8)
    trace.begin()
    one @ one
    trace.end(file)
    torch.tanh(one)
    assert "aten::mm" in names(file)
    assert "aten::tanh" not in names(file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_trace_that_was_never_ended_gives_way_to_the_next(tmp_path):
    trace, one = StepProfile(), torch.ones(8, 8)
    trace.begin()
    torch.tanh(one)
    trace.begin()
    one @ one
    trace.end(tmp_path / "a.json")
    assert "aten::mm" in names(tmp_path / "a.json")
    assert "aten::tanh" not in names(tmp_path / "a.json")


def test_an_end_without_a_beginning_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="expected begin_profile"):
        StepProfile().end(tmp_path / "a.json")
