"""A bar on a terminal, lines elsewhere, and the estimated time left."""

import io

import pytest
from rich.console import Console

from mega_agentrl.report.progress import EtaEstimator, StageProgress, StepSummary, format_duration
from tests.manual_clock import ManualClock

VIEW = StepSummary(
    step=3,
    metrics={"reward": 0.4125, "success": 0.5},
    phase_s={"generate": 1.5, "update": 0.75},
    tokens_per_s=2310.4,
    unique_tokens_per_s=1204.6,
)


def view(step):
    return StepSummary(step=step, metrics={"loss": 1.0})


def plain():
    out = io.StringIO()
    return out, Console(file=out, force_terminal=False, width=60)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (6.6, "0:07"), (185, "3:05"), (7385, "2:03:05"), (-1, "0:00")],
)
def test_a_duration_is_shown_in_minutes_and_seconds(seconds, text):
    assert format_duration(seconds) == text


def test_time_left_is_the_mean_duration_of_the_last_steps():
    clock = ManualClock()
    left = EtaEstimator(10, clock)
    clock.now_s = 4.0
    assert left.update(2) == pytest.approx(2.0 * 8)
    clock.now_s = 10.0
    assert left.update(3) == pytest.approx(10.0 / 3 * 7)
    clock.now_s = 20.0
    assert left.update(10) == 0.0


def test_steps_of_an_earlier_start_took_no_time():
    clock = ManualClock()
    left = EtaEstimator(10, clock, num_done=6)
    clock.now_s = 4.0
    assert left.update(8) == pytest.approx(2.0 * 2)


def test_time_left_forgets_a_slow_start():
    clock = ManualClock()
    left = EtaEstimator(100, clock)
    clock.now_s = 1000.0  # the first step
    left.update(1)
    for step in range(2, 20):
        clock.now_s += 1.0
        seconds = left.update(step)
    assert seconds == pytest.approx(100 - 19)


def test_a_log_file_gets_one_line_for_each_due_step():
    out, console = plain()
    clock = ManualClock()
    with StageProgress("rl", 40, console=console, plain_every_s=5.0, clock=clock) as progress:
        for step in range(1, 41):
            clock.now_s += 1.0
            progress.update(view(step))
    first, *steps, last = out.getvalue().splitlines()
    assert (first, last) == ("rl ...", "rl took 0:40")
    shown = [line.split()[1] for line in steps]
    assert shown == [f"{step}/40" for step in (1, 6, 11, 16, 21, 26, 31, 36, 40)]
    assert steps[0] == "rl 1/40  loss 1.000  eta 0:39"
    assert "\x1b" not in out.getvalue()


def test_a_long_line_is_not_wrapped_and_brackets_stay():
    out, console = plain()
    with StageProgress("rl [x]", 3, console=console) as progress:
        progress.update(VIEW)
        progress.print_line("[red]kept as it is")
    lines = out.getvalue().splitlines()
    assert lines[1].startswith("rl [x] 3/3  reward 0.412")
    assert "step 2.25 s = generate 1.50 · update 0.75" in lines[1]
    assert lines[1].endswith("  2,310 tokens/s (1,205 unique)")
    assert lines[2] == "[red]kept as it is"
    assert len(lines) == 4


def test_a_terminal_gets_a_bar_that_ends_full_with_its_time():
    out, clock = io.StringIO(), ManualClock()
    console = Console(file=out, force_terminal=True, width=120)
    with StageProgress("rl", 3, console=console, clock=clock) as progress:
        for step in (1, 2, 3):
            clock.now_s += 2.0
            progress.update(StepSummary(step=step, metrics=VIEW.metrics, phase_s=VIEW.phase_s))
    text = out.getvalue()
    assert "━" in text
    assert "eta 0:04" in text
    assert text.index("3/3") < text.index("took 0:06")
    assert "generate 1.50" in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is visible again


def test_a_stage_without_steps_shows_its_title_and_time_but_no_bar():
    out, clock = io.StringIO(), ManualClock()
    with StageProgress("held out", 1, console=Console(file=out, force_terminal=True), clock=clock):
        clock.now_s = 12.0
    assert "held out" in out.getvalue()
    assert "took 0:12" in out.getvalue()
    assert "0/1" not in out.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_ends_the_stage_and_shows_the_cursor_again(terminal):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with pytest.raises(KeyboardInterrupt), StageProgress("rl", 3, console=console) as progress:
        progress.update(VIEW)
        raise KeyboardInterrupt
    assert "ended after 0:00" in out.getvalue()
    assert ("\x1b[?25h" in out.getvalue()) is terminal


def test_the_bar_of_an_rl_step_fits_80_columns():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, no_color=True, width=80)
    with StageProgress("RL", 400, console=console) as progress:
        progress.update(VIEW)
    assert any(
        "reward 0.412  success 0.500" in line and "eta" in line
        for line in out.getvalue().splitlines()
    )


def test_a_warning_ends_the_line_and_is_shown_at_once():
    out, console = plain()
    with StageProgress("RL", 9, console=console, plain_every_s=60.0, clock=ManualClock()) as stage:
        stage.update(view(1))
        stage.update(view(2))
        for step in (3, 4):
            warned = StepSummary(step=step, metrics={"loss": 1.0}, warning="2 of 6 failed")
            stage.update(warned)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("RL ")]
    assert [line.split()[1] for line in lines[1:-1]] == ["1/9", "3/9"]
    assert lines[2].endswith("2 of 6 failed")


def test_a_warning_is_below_the_bar_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60)
    with StageProgress("RL", 9, console=console) as stage:
        stage.update(StepSummary(step=1, metrics={}, warning="2 of 6 failed"))
    assert "2 of 6 failed" in out.getvalue()
