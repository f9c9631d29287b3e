"""A run that is ended at any moment and started again ends as one that nobody disturbed."""

import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.restore import restore
from mega_agentrl.train.signals import RunInterrupted, SignalHandler
from mega_agentrl.train.trainer import MAX_FAILURES_WITHOUT_PROGRESS
from mega_agentrl.types.errors import AuxiliaryModelLostError, RankLostError
from tests.config.refusals import refused
from tests.train.file_policy import WEIGHT
from tests.train.interruptible_run import (
    STEPS,
    Killed,
    Moments,
    die,
    interruptible_config,
    outcome,
    start,
)

KINDS = {
    "warm start and ARES": {"warm": True, "ares": True},
    "adaptive KL": {"warm": False, "ares": False},
    "critic with its warm-up": {"warm": False, "ares": False, "critic": True},
}
pytestmark = pytest.mark.usefixtures("bare_runs")


def kinds_and_moments(quick, first):
    """Parametrize by kind and first moment: one pair is quick, the others are not."""
    rest = [kind for kind in KINDS if kind != quick]
    return pytest.mark.parametrize(
        ("kind", "first"),
        [
            (quick, first),
            *(pytest.param(kind, first, marks=pytest.mark.extended) for kind in rest),
            *(pytest.param(kind, 1 - first, marks=pytest.mark.slow) for kind in KINDS),
        ],
    )


def run_on(config, first, signal_handler=None):
    """Start until it ends by itself; returns what it leaves, and how often it was ended."""
    num_ended = 0
    try:
        components = start(config, first, signal_handler)
    except (Killed, RunInterrupted):
        num_ended = 1
        components = start(config, Moments())
    return outcome(config, components), num_ended


@kinds_and_moments("warm start and ARES", first=0)
def test_a_run_killed_at_any_moment_ends_as_if_undisturbed(config, tmp_path, kind, first):
    """first: every second moment from here on; a signal comes at the others."""
    moments = Moments()
    make = partial(interruptible_config, config, **KINDS[kind])
    expected, _ = run_on(make(tmp_path / "whole"), moments)
    assert expected["summary"]["num_steps"] == STEPS
    assert expected["lines"][-1]["stage"] == "held_out_after"
    chosen = [at for at, name in enumerate(moments.names) if name != "generate"]
    assert len(chosen) > 20
    for at in chosen[first::2]:
        found, num_ended = run_on(make(tmp_path / f"killed-{at}"), Moments(at, die))
        assert num_ended == 1
        assert found == expected, f"killed at moment {at}, {moments.names[at]}"


@kinds_and_moments("adaptive KL", first=1)
def test_a_signal_at_any_moment_saves_and_the_run_goes_on(config, tmp_path, kind, first):
    moments = Moments()
    make = partial(interruptible_config, config, **KINDS[kind])
    expected, _ = run_on(make(tmp_path / "whole"), moments)
    chosen = [at for at, name in enumerate(moments.names) if name != "generate" or at % 9 == 0]
    for at in chosen[first::2]:
        folder, signal_handler = tmp_path / f"stopped-{at}", SignalHandler()
        ask = partial(signal_handler.on_signal, signal.SIGUSR1)
        found, num_ended = run_on(make(folder), Moments(at, ask), signal_handler)
        assert num_ended == 1
        assert found == expected, f"stopped at moment {at}, {moments.names[at]}"


def test_evaluations_within_rl_change_no_step_and_are_made_once(config, tmp_path):
    make = partial(interruptible_config, config, warm=False, ares=False)
    with_them = outcome(made := make(tmp_path / "with", every=1), start(made, Moments()))
    without = outcome(made := make(tmp_path / "without", every=0), start(made, Moments()))
    stages = [(line["stage"], line["step"]) for line in with_them["lines"]]
    steps = [("rl", 1), ("held_out_during", 1), ("rl", 2), ("held_out_during", 2), ("rl", 3)]
    assert stages == [("held_out_before", 0), *steps, ("held_out_after", 3)]
    rest = [line for line in with_them["lines"] if line["stage"] != "held_out_during"]
    assert rest == without["lines"]
    assert [with_them[key] == without[key] for key in ("weight", "served")] == [True, True]
    shown = [point["step"] for point in with_them["summary"]["held_out"]]
    assert shown == [0, 1, 2, 3]
    # What is evaluated is the weight of that step, so it differs from step to step.
    rewards = [point["reward"] for point in with_them["summary"]["held_out"]]
    assert len(set(rewards)) > 1


def test_an_evaluation_of_the_start_alone_takes_no_checkpoint(config, tmp_path):
    made, _ = saved_run(config, tmp_path, warm=False, ares=False)
    alone = replace(made, total_steps=0)
    error = refused(start, alone, Moments())
    assert error.key == "run_dir"
    assert "step-000002" in error.got


def test_a_checkpoint_without_its_critics_half_is_passed_over(config, tmp_path, caplog):
    made, expected = saved_run(config, tmp_path, warm=False, ares=False, critic=True)
    half = Path(made.run_dir) / "critic" / "step-000002"
    shutil.rmtree(half)
    assert outcome(made, start(made, Moments())) == expected
    assert "step-000002 is skipped" in caplog.text


def test_the_critic_begins_anew_where_the_policy_of_every_checkpoint_is_damaged(config, tmp_path):
    made, expected = saved_run(config, tmp_path, warm=False, ares=False, critic=True)
    for folder in run_state.valid_checkpoints(Path(made.run_dir)):
        # As long as before: the critic's half is taken up before reading this one tells.
        half = folder / WEIGHT
        half.write_text("9" * len(half.read_text()))
    assert outcome(made, start(made, Moments())) == expected


def test_a_signal_loses_no_finished_step(config, tmp_path):
    moments = Moments()
    make = partial(interruptible_config, config, warm=False, ares=False, save_every=0)
    start(make(tmp_path / "whole"), moments)
    updates = [at for at, name in enumerate(moments.names) if name == "update"]
    logprobs = [at for at, name in enumerate(moments.names) if name == "compute_log_probs"]
    # In the update of step k it ends with the step; before it, with the step before.
    for at, step in [*zip(updates, (1, 2, 3), strict=True), *zip(logprobs, (0, 1, 2), strict=True)]:
        folder, signal_handler = tmp_path / f"stopped-{at}", SignalHandler()
        ask = partial(signal_handler.on_signal, signal.SIGTERM)
        with pytest.raises(RunInterrupted) as caught:
            start(make(folder), Moments(at, ask), signal_handler)
        assert caught.value.number == signal.SIGTERM
        assert run_state.valid_checkpoints(folder)[0].name == f"step-{step:06d}"


def test_a_run_killed_again_and_again_ends_as_if_undisturbed(config, tmp_path):
    make = partial(interruptible_config, config, warm=True, ares=True, save_every=1)
    expected, _ = run_on(make(tmp_path / "whole"), Moments())
    made = make(tmp_path / "killed")
    # Each life gets one step further; the first has the warm start's checkpoint to write, too.
    for number in (2, 1, 1):
        with pytest.raises(Killed):
            start(made, Moments(("saved", number), die))
    assert run_state.valid_checkpoints(tmp_path / "killed")[0].name == f"step-{STEPS:06d}"
    assert outcome(made, start(made, Moments())) == expected


def test_a_run_stopped_by_the_queue_in_every_stage_reaches_its_end(config, tmp_path):
    make = partial(interruptible_config, config, warm=True, ares=True)
    expected, _ = run_on(make(tmp_path / "whole"), Moments())
    made, where = make(tmp_path / "stopped"), []
    # In the update or the check of the warm start, behind it, before and in the first step.
    lives = [("sft_step", 1), ("sft_step", 1), ("sync", 2), ("reset_optimizer", 1), ("saved", 1)]
    lives += [("generate", 5), ("compute_log_probs", 1), ("update", 1), ("update", 1)]
    for life in [*lives, ("export_hf", 1)]:
        signal_handler = SignalHandler()
        ask = partial(signal_handler.on_signal, signal.SIGUSR1)
        with pytest.raises(RunInterrupted):
            start(made, Moments(life, ask), signal_handler)
        where.append(run_state.valid_checkpoints(tmp_path / "stopped")[0].name)
    assert where[:5] == ["warm-000001", "warm-000002", "warm-000002", "warm-000002", "step-000000"]
    assert where[5:] == ["step-000000"] * 2 + ["step-000001", "step-000002", "step-000003"]
    assert outcome(made, start(made, Moments())) == expected


def test_a_killed_save_is_a_line_and_the_run_goes_on_from_the_checkpoint_before(
    config, tmp_path, caplog
):
    made = interruptible_config(config, tmp_path, warm=False, ares=False, save_every=1)
    with pytest.raises(Killed):
        start(made, Moments(("written", 2), die))
    assert [path.name for path in run_state.valid_checkpoints(tmp_path)] == ["step-000001"]
    start(made, Moments())
    assert "step-000002.partial-" in caplog.text
    assert "was not finished and is skipped" in caplog.text
    assert not list((tmp_path / "checkpoints").glob("*.partial-*"))


def saved_run(config, folder, **kind):
    """Ended at the end of the last step, with checkpoints of steps 1 and 2."""
    moments, made = Moments(), interruptible_config(config, folder / "whole", save_every=1, **kind)
    expected, _ = run_on(made, moments)
    last = [at for at, name in enumerate(moments.names) if name == "saved"][-2]
    made = replace(made, run_dir=str(folder / "run"))
    with pytest.raises(Killed):
        start(made, Moments(last, die))
    found = [path.name for path in run_state.valid_checkpoints(folder / "run")]
    assert found[:2] == ["step-000002", "step-000001"]
    return made, expected


@pytest.mark.parametrize("text", ["", "9.9"], ids=["size", "contents"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(config, tmp_path, caplog, text):
    made, expected = saved_run(config, tmp_path, warm=False, ares=False)
    newest = run_state.valid_checkpoints(Path(made.run_dir))[0]
    path = newest / WEIGHT
    # The contents are of the same size, so that only their digest gives them away.
    path.write_text(text and "9" * len(path.read_text()))
    components = start(made, Moments())
    assert outcome(made, components) == expected
    assert f"checkpoint {newest} is" in caplog.text


def test_without_the_warm_start_there_is_no_reference_to_go_on_with(config, tmp_path):
    made, _ = saved_run(config, tmp_path, warm=True, ares=False)
    (Path(made.run_dir) / "warm_start" / "step-000000" / WEIGHT).unlink()
    error = refused(start, made, Moments())
    assert error.key == "run_dir"
    assert "warm_start/" in error.got


def test_a_later_start_may_ask_for_more_steps(config, tmp_path):
    made, _ = saved_run(config, tmp_path, warm=False, ares=False)
    longer = replace(made, total_steps=5)
    found = outcome(longer, start(longer, Moments()))
    whole = replace(longer, run_dir=str(tmp_path / "longer"))
    assert found == outcome(whole, start(whole, Moments()))


def test_metrics_of_a_run_without_a_checkpoint_are_removed(components, config, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("old\n")
    assert restore(components, config) is None
    assert not (tmp_path / "metrics.jsonl").exists()
    assert components.policy.calls == []


def test_the_screen_shows_the_step_after_which_a_run_continues(config, tmp_path, capsys):
    made, _ = saved_run(config, tmp_path, warm=False, ares=False)
    capsys.readouterr()
    start(made, Moments())
    shown = capsys.readouterr().out
    assert "continuing after RL step 2" in shown
    assert "RL 3/3" in shown and "RL 1/3" not in shown


def lose():
    raise RankLostError("policy rank 1 died")


@pytest.mark.parametrize(
    ("warm", "critic"),
    [
        pytest.param(False, False, marks=pytest.mark.extended),
        pytest.param(True, True, marks=pytest.mark.extended),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_a_policy_lost_at_any_moment_leaves_a_run_that_ends_as_if_undisturbed(
    config, tmp_path, warm, critic
):
    moments = Moments()
    make = partial(interruptible_config, config, warm=warm, ares=False, critic=critic)
    components = start(make(tmp_path / "whole"), moments)
    assert components.policy.num_restarts == 0
    expected = outcome(make(tmp_path / "whole"), components)
    # A policy that is lost says so when it is asked for something.
    others = ("generate", "critic", "critic saved", "commit", "saved")
    chosen = [at for at, name in enumerate(moments.names) if name not in others]
    assert len(chosen) > 15
    for at in chosen:
        settings = make(tmp_path / f"lost-{at}")
        components = start(settings, Moments(at, lose))
        assert components.policy.num_restarts == 1
        found = outcome(settings, components)
        assert found == expected, f"lost at moment {at}, {moments.names[at]}"


def test_a_critic_lost_at_its_first_or_last_update_leaves_a_run_that_ends_as_if_undisturbed(
    config, tmp_path
):
    def lose_critic():
        raise AuxiliaryModelLostError("critic rank 0 died")

    make = partial(interruptible_config, config, warm=False, ares=False, critic=True)
    components = start(make(tmp_path / "whole"), moments := Moments())
    assert components.critic.num_restarts == 0
    expected = outcome(make(tmp_path / "whole"), components)
    for number in (1, moments.names.count("critic")):
        settings = make(tmp_path / f"lost-{number}")
        components = start(settings, Moments(("critic", number), lose_critic))
        assert (components.policy.num_restarts, components.critic.num_restarts) == (1, 1)
        assert outcome(settings, components) == expected


def test_a_policy_that_dies_again_in_its_restart_is_restarted_again(config, tmp_path):
    """As in an update whose weights do not fit into memory beside those of the engines."""

    def act(name):
        moments.names.append(name)
        if name in ("sync", "restart") and moments.names.count(name) == 1:
            lose()

    make = partial(interruptible_config, config, warm=False, ares=False)
    expected = outcome(make(tmp_path / "whole"), start(make(tmp_path / "whole"), Moments()))
    moments = Moments()
    moments.pass_by = act
    settings = make(tmp_path / "lost")
    components = start(settings, moments)
    assert components.policy.num_restarts == 2
    assert outcome(settings, components) == expected


def test_a_policy_that_always_dies_at_the_same_place_is_given_up(config, tmp_path, capsys):
    moments = Moments()
    moments.pass_by = lambda name: lose() if name == "update" else None
    settings = interruptible_config(config, tmp_path / "run", warm=False, ares=False)
    with pytest.raises(RankLostError):
        start(settings, moments)
    num_restarts = capsys.readouterr().err.count("restarted from the beginning")
    assert num_restarts == MAX_FAILURES_WITHOUT_PROGRESS - 1
