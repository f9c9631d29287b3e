"""Traces contain the operations between start and stop, and no others."""

import json

import pytest
import torch

from mega_agentrl.actor.training.profiler import StepProfiler


def names(file):
    return {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}


def test_what_was_done_in_between_is_in_the_trace(tmp_path):
    trace, file = StepProfiler(), tmp_path / "profile" / "step-3-rank0.json"
    one = torch.ones(8, 8)
    trace.start()
    one @ one
    trace.stop(file)
    torch.tanh(one)
    assert "aten::mm" in names(file)
    assert "aten::tanh" not in names(file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_an_unfinished_trace_is_dropped_by_the_next_start(tmp_path):
    trace, one = StepProfiler(), torch.ones(8, 8)
    trace.start()
    torch.tanh(one)
    trace.start()
    one @ one
    trace.stop(tmp_path / "a.json")
    assert "aten::mm" in names(tmp_path / "a.json")
    assert "aten::tanh" not in names(tmp_path / "a.json")


def test_stop_without_start_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="expected start_profile"):
        StepProfiler().stop(tmp_path / "a.json")
