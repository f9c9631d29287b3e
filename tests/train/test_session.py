"""What is shown: lines of progress, the closing table, rollouts of different questions."""

import io

from rich.console import Console

from mega_agentrl.train.controllers import start
from mega_agentrl.train.evaluate import evaluate_held_out
from mega_agentrl.train.loop import train_step
from mega_agentrl.train.phases import open_groups
from mega_agentrl.train.session import Session


def screen():
    return Console(file=io.StringIO(), width=160)


def test_a_step_shows_reward_success_phases_and_speed(parts, config):
    console = screen()
    with (
        Session(parts.run_dir, config, console) as session,
        session.stage("RL", 1),
        open_groups(parts, config) as groups,
    ):
        train_step(parts, config, session, groups, start(config.algo), 1)
    shown = console.file.getvalue()
    for piece in ("RL 1/1", "reward", "success", "tokens/s", "rollout", "update", "eta"):
        assert piece in shown


def test_the_end_shows_before_and_after_side_by_side(parts, config):
    console = screen()
    with Session(parts.run_dir, config, console) as session:
        before = session.show_held_out("before", evaluate_held_out(parts, config))
        with session.stage("RL", 1), open_groups(parts, config) as groups:
            train_step(parts, config, session, groups, start(config.algo), 1)
        after = session.show_held_out("after", evaluate_held_out(parts, config))
        session.finish(before, after)
    shown = console.file.getvalue()
    assert f"held-out reward before RL: {before.sampled.reward:.3f}" in shown
    assert f"held-out reward after RL: {after.sampled.reward:.3f}" in shown
    for piece in ("before", "after", "change", "response tokens", "question p", "run folder"):
        assert piece in shown
