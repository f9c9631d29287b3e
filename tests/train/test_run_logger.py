"""What is shown: lines of progress, the closing table, rollouts of different questions."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

from rich.console import Console

from mega_agentrl.train.controllers import initial_controllers
from mega_agentrl.train.evaluate import evaluate_validation_set
from mega_agentrl.train.run_logger import RunLogger
from mega_agentrl.train.trainer import open_trainer, train
from mega_agentrl.types.monitoring import Monitors
from tests.through_json import through_json
from tests.train.metric_lines import metric_lines


def screen():
    return Console(file=io.StringIO(), width=160)


def test_the_screen_shows_steps_and_the_end_before_and_after_side_by_side(components, config):
    console = screen()
    with RunLogger(components.run_dir, config, console) as logger:
        before = logger.log_validation("before", evaluate_validation_set(components, config))
        controllers = initial_controllers(config.algo)
        with (
            logger.stage("RL", 1),
            open_trainer(components, config, logger, controllers) as trainer,
        ):
            trainer.step(1)
        step = console.file.getvalue()
        after = logger.log_validation("after", evaluate_validation_set(components, config))
        logger.finish(before, after)
    for piece in ("RL 1/1", "reward", "success", "tokens/s (", "rollout", "update", "eta"):
        assert piece in step
    end = console.file.getvalue().removeprefix(step)
    assert f"{before.sampled.reward:.3f}" in step and f"{after.sampled.reward:.3f}" in end
    for piece in ("before", "after", "change", "response tokens", "question p", "run folder"):
        assert piece in end
    url = urlsplit(end.rpartition("report: ")[2].strip())
    assert url.scheme == "file" and Path(unquote(url.path)).is_file()


class FakeMonitors:
    """A tracker, a monitor of two GPUs and spans that record their calls."""

    run_id = ""

    def __init__(self):
        self.lines, self.begun, self.scored_ids, self.tracer = [], [], set(), self

    def log(self, stage, step, numbers):
        self.lines.append((stage, step, numbers))

    def collect(self):
        return {"gpu/util/min": 0.5, "gpu/util/worst": "node-7 GPU 3"}

    def start_trajectory(self, name, attributes, parent):
        self.begun.append((name, attributes["step"]))

    def record_score(self, trajectory):
        self.scored_ids.add(trajectory.trajectory_id)


def test_monitors_are_called_in_a_run(components, config):
    monitors = FakeMonitors()
    driver = SimpleNamespace(collect=lambda: {"driver/rss_mib": 3.0})
    components.monitors = Monitors(
        trackers=[monitors], gpu=monitors, driver=driver, rollout_spans=monitors
    )
    train(components, config)
    seen = [(stage, step) for stage, step, _ in monitors.lines]
    assert seen == [("held_out_before", 0), ("rl", 1), ("rl", 2), ("held_out_after", 2)]
    _, _, numbers = monitors.lines[1]
    assert numbers["driver/rss_mib"] == 3.0
    assert numbers["gpu/util/min"] == 0.5 and numbers["perf/tokens_per_s"] > 0
    assert numbers["perf/unique_tokens_per_s"] > 0 and numbers["tree/token_ratio"] > 1
    assert "gpu/util/worst" not in numbers and "perf/mfu" not in numbers
    assert metric_lines(components.run_dir)[1]["gpu/util/worst"] == "node-7 GPU 3"
    assert {"train-1", "train-2"} < {step for _, step in monitors.begun}
    assert {name for name, _ in monitors.begun} == monitors.scored_ids


def test_a_restored_logger_continues_another_one(components, config):
    def logger_of(name):
        return RunLogger(components.run_dir / name, config, screen())

    with (
        logger_of("one") as one,
        one.stage("RL", 2),
        open_trainer(components, config, one, initial_controllers(config.algo)) as trainer,
    ):
        trainer.step(1)
        state = through_json(one.state())
    assert [point.step for point in state.step_points] == [1]
    assert state.stage_s["RL"] > 0, "a stage that is under way counts"
    with logger_of("two") as two:
        two.load_state(state)
        assert two.state() == replace(state, unwritten_line=None)
        two.load_state(state)
        two.log_startup(2.0)
        with two.stage("RL", 2, num_done=1):
            pass
        seconds = two.state().stage_s
    (line,) = metric_lines(components.run_dir / "two")
    assert (line["stage"], line["step"]) == ("rl", 1), "the line that was not written, once"
    assert seconds["start"] == 2.0
    assert seconds["RL"] > state.stage_s["RL"]
