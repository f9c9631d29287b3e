"""What the terminal shows while a run starts."""

import pytest

from mega_agentrl.report.start_progress import StartProgress
from tests.manual_clock import ManualClock


@pytest.fixture
def clock():
    return ManualClock(1000.0)


def test_each_stage_is_named_when_it_begins_and_timed_at_the_end(clock, capsys):
    progress = StartProgress(9.5, clock)
    progress.begin("Ray")
    assert capsys.readouterr().out.split() == ["start", "0:10", "Ray", "..."]
    clock.now_s += 3
    progress.begin("engines", "imports of vLLM")
    assert "imports of vLLM" in capsys.readouterr().out
    clock.now_s += 60
    progress.finish()
    shown = capsys.readouterr().out
    assert "1:12" in shown and "Ray 3.0 s" in shown and "engines 60.0 s" in shown
    assert progress.elapsed_s == pytest.approx(72.5)


def test_a_note_has_the_time_and_ends_no_stage(clock, capsys):
    progress = StartProgress(clock=clock)
    progress.begin("policy")
    clock.now_s += 2
    progress.note("attention torch")
    assert capsys.readouterr().out.endswith("start 0:02  attention torch\n")
    clock.now_s += 2
    progress.finish()
    assert "policy 4.0 s" in capsys.readouterr().out


def test_the_time_between_stages_with_the_same_name_is_added_up(clock, capsys):
    progress = StartProgress(clock=clock)
    for _ in range(2):
        progress.begin("engines")
        clock.now_s += 2
    progress.finish()
    assert "engines 4.0 s" in capsys.readouterr().out
