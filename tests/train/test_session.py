"""What is shown: lines of progress, the closing table, rollouts of different questions."""

import io
import json

import pytest
from rich.console import Console

from mega_agentrl.train.controllers import start
from mega_agentrl.train.evaluate import evaluate_held_out
from mega_agentrl.train.loop import train, train_step
from mega_agentrl.train.phases import open_groups
from mega_agentrl.train.session import Session
from mega_agentrl.types.watch import Watch


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


class Eyes:
    """A tracker, a watch over two GPUs and spans that note what they are told."""

    run_id = ""

    def __init__(self):
        self.lines, self.begun, self.scored_ids, self.tracer = [], [], set(), self

    def log(self, stage, step, numbers):
        self.lines.append((stage, step, numbers))

    def take(self):
        return {"gpu/util/min": 0.5, "gpu/util/worst": "node-7 GPU 3"}

    def begin(self, name, attributes, parent):
        self.begun.append((name, attributes["step"]))

    def scored(self, trajectory):
        self.scored_ids.add(trajectory.trajectory_id)


def test_a_run_is_seen_by_whoever_watches_it(parts, config):
    eyes = Eyes()
    parts.demonstrations = None
    parts.watch = Watch(trackers=[eyes], gpus=eyes, spans=eyes)
    train(parts, config)
    seen = [(stage, step) for stage, step, _ in eyes.lines]
    assert seen == [("held_out_before", 0), ("rl", 1), ("rl", 2), ("held_out_after", 2)]
    _, _, numbers = eyes.lines[1]
    assert numbers["gpu/util/min"] == 0.5 and numbers["perf/tokens_per_s"] > 0
    assert "gpu/util/worst" not in numbers and "perf/mfu" not in numbers
    lines = (parts.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["gpu/util/worst"] == "node-7 GPU 3"
    assert {"train-1", "train-2"} < {step for _, step in eyes.begun}
    assert {name for name, _ in eyes.begun} == eyes.scored_ids


def test_a_session_goes_on_where_another_one_was(parts, config):
    def session_of(name):
        return Session(parts.run_dir / name, config, screen())

    with session_of("one") as one, one.stage("RL", 2), open_groups(parts, config) as groups:
        train_step(parts, config, one, groups, start(config.algo), 1)
        state = json.loads(json.dumps(one.state()))
    assert [point["step"] for point in state["curve"]] == [1]
    assert state["stage_seconds"]["RL"] > 0, "a stage that is under way counts"
    with session_of("two") as two:
        two.take_up(state)
        assert json.loads(json.dumps(two.state())) == state
        two.started(2.0)
        with two.stage("RL", 2, num_done=1):
            pass
        seconds = two.state()["stage_seconds"]
    assert seconds["start"] == 2.0
    assert seconds["RL"] > state["stage_seconds"]["RL"]


@pytest.mark.parametrize("state", [{}, {"curve": [{"step": 1}]}])
def test_what_is_no_state_of_a_session_is_refused(parts, config, state):
    with (
        Session(parts.run_dir, config, screen()) as session,
        pytest.raises(ValueError, match="session state"),
    ):
        session.take_up(state)
