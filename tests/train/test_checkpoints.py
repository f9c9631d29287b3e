"""When a step boundary is saved, what it contains, and what is not saved at all."""

import signal

import pytest

from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.train.checkpoints import CheckpointManager
from mega_agentrl.train.controllers import initial_controllers
from mega_agentrl.train.evaluate import evaluate_validation_set
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.run_state import RunState
from mega_agentrl.train.run_logger import RunLogger
from mega_agentrl.train.scheduler import rollout_stream_name
from mega_agentrl.train.signals import RunInterrupted, SignalHandler
from mega_agentrl.types.errors import AuxiliaryModelLostError, RankLostError
from tests.fakes import make_scored_tree


@pytest.fixture
def opened(components, config):
    """Makes a `CheckpointManager` of the run, at its beginning or from a state."""
    components.prompt_source = PromptSampler(components.validation_prompts, seed=1)
    with RunLogger(components.run_dir, config) as logger:
        yield lambda signal_handler=None, state=None: CheckpointManager(
            components, config, logger, signal_handler or SignalHandler(), state
        )


def names(components):
    return sorted(path.name for path in run_state.valid_checkpoints(components.run_dir))


def newest(components):
    return run_state.load_checkpoint(
        components.policy, run_state.valid_checkpoints(components.run_dir)[0]
    )


@pytest.mark.parametrize(
    ("every", "total", "saved"), [(2, 5, [2, 4, 5]), (0, 3, [3]), (1, 2, [1, 2]), (9, 9, [9])]
)
def test_checkpoints_are_saved_at_the_interval_and_at_the_end(
    components, config, opened, every, total, saved
):
    config.save_every_steps, config.total_steps = every, total
    with opened() as checkpoints:
        checkpoints.record_warm_start_done()
        for step in range(1, total + 1):
            checkpoints.record_step(step, initial_controllers(config.algo))
            assert checkpoints.step == step
        checkpoints.finish()
    assert components.policy.calls == [f"save step-{step:06d}" for step in saved]


@pytest.mark.usefixtures("demonstrations")
def test_the_checkpoint_after_a_warm_start_is_kept(components, config, opened):
    config.save_every_steps, config.total_steps = 1, 4
    with opened() as checkpoints:
        checkpoints.record_warm_start_done()
        for step in range(1, 5):
            checkpoints.record_step(step, initial_controllers(config.algo))
        checkpoints.finish()
    assert names(components) == ["step-000000", "step-000003", "step-000004"]
    assert (components.run_dir / "warm_start" / "step-000000" / "manifest.json").exists()


def test_a_signal_saves_the_last_boundary_and_nothing_after_it(components, config, opened):
    config.save_every_steps, config.total_steps = 0, 9
    components.generator.version = 4
    signal_handler = SignalHandler()
    with pytest.raises(RunInterrupted), opened(signal_handler) as checkpoints:
        checkpoints.record_warm_start_done()
        checkpoints.record_validation_before(evaluate_validation_set(components, config))
        components.prompt_source.ack(components.prompt_source.next_prompts(3))
        checkpoints.record_step(1, initial_controllers(config.algo))
        at_pause = components.prompt_source.state_dict()
        components.prompt_source.next_prompts(2)
        signal_handler.on_signal(signal.SIGTERM)
    state = newest(components)
    assert (state.step, state.weight_version) == (1, 4)
    assert state.sampler_state == at_pause != components.prompt_source.state_dict()
    assert state.controllers == initial_controllers(config.algo)
    assert state.validation_before.sampled.num_questions == 6
    assert state.logger_state.step_points == ()


@pytest.mark.usefixtures("demonstrations")
def test_a_saved_boundary_is_not_saved_again(components, config, opened):
    config.save_every_steps, config.total_steps = 1, 9
    for state in (None, "saved"):
        signal_handler = SignalHandler()
        taken = newest(components) if state else None
        with pytest.raises(RunInterrupted), opened(signal_handler, taken) as checkpoints:
            if taken is None:
                checkpoints.record_warm_start_done()
                checkpoints.record_step(1, initial_controllers(config.algo))
            assert checkpoints.step == 1
            signal_handler.on_signal(signal.SIGTERM)
    assert components.policy.calls == ["save step-000000", "save step-000001"]


class SlowDisk:
    """Lets the policy of a run report its files only when it may; `errors` are raised before."""

    def __init__(self, policy):
        self.is_written, self.errors = False, []
        self._policy, self._save_result = policy, policy.save_result
        policy.save_result = self.save_result

    def save_result(self, wait_s):
        if self.errors:
            raise self.errors.pop()
        return self._save_result(wait_s) if self.is_written or wait_s else None


def partials(components):
    return list((components.run_dir / "checkpoints").glob("*.partial-*"))


def test_a_checkpoint_is_committed_at_the_first_boundary_after_it_is_written(
    components, config, opened
):
    config.save_every_steps, config.total_steps = 4, 9
    disk = SlowDisk(components.policy)
    with opened() as checkpoints:
        checkpoints.record_warm_start_done()
        for step in range(1, 6):
            components.policy.weight = float(step)
            checkpoints.record_step(step, initial_controllers(config.algo))
            assert names(components) == []
        disk.is_written = True
        assert names(components) == []
        checkpoints.record_step(6, initial_controllers(config.algo))
        assert names(components) == ["step-000004"]
        assert newest(components).step == 4
        assert components.policy.weight == 4.0, "as it was at its boundary"


def test_the_next_save_and_the_end_of_a_run_wait_for_the_one_before(components, config, opened):
    config.save_every_steps, config.total_steps = 1, 2
    SlowDisk(components.policy)
    with opened() as checkpoints:
        checkpoints.record_warm_start_done()
        checkpoints.record_step(1, initial_controllers(config.algo))
        assert names(components) == []
        checkpoints.record_step(2, initial_controllers(config.algo))
        assert names(components) == ["step-000001"]
        checkpoints.finish()
        assert names(components) == ["step-000001", "step-000002"]


def test_trees_are_dropped_when_a_checkpoint_includes_them_and_not_before(
    components, config, opened
):
    config.save_every_steps, config.total_steps = 1, 9
    disk = SlowDisk(components.policy)
    tree = make_scored_tree(1.0)
    with opened() as checkpoints:
        checkpoints.record_warm_start_done()
        for step in (1, 2):
            checkpoints.tree_store.put(rollout_stream_name(step), "p", 0, tree)
        checkpoints.record_step(1, initial_controllers(config.algo))
        assert len(checkpoints.tree_store.steps) == 2
        config.save_every_steps, disk.is_written = 0, True
        checkpoints.record_step(2, initial_controllers(config.algo))
        # Step 2 is in no checkpoint yet, although it is finished.
        assert checkpoints.tree_store.steps == {rollout_stream_name(2)}


@pytest.mark.parametrize("error", [OSError("no space"), RuntimeError("rank 1: no space")])
def test_a_failed_save_is_a_line_and_repeated_at_the_next_boundary(
    components, config, opened, capsys, error
):
    config.save_every_steps, config.total_steps = 2, 9
    disk = SlowDisk(components.policy)
    with opened() as checkpoints:
        checkpoints.record_warm_start_done()
        for step in (1, 2):
            checkpoints.record_step(step, initial_controllers(config.algo))
        disk.is_written, disk.errors = True, [error]
        checkpoints.record_step(3, initial_controllers(config.algo))
        assert names(components) == []
        checkpoints.record_step(4, initial_controllers(config.algo))
    assert names(components) == ["step-000003"]
    assert "previous one stays the newest" in capsys.readouterr().out
    saved = [call for call in components.policy.calls if call.startswith("save")]
    assert saved == ["save step-000002", "save step-000003", "save step-000004"]


def test_a_save_that_fails_twice_ends_the_run(components, config, opened):
    config.save_every_steps, config.total_steps = 1, 9
    disk = SlowDisk(components.policy)
    with pytest.raises(OSError), opened() as checkpoints:
        checkpoints.record_warm_start_done()
        for step in (1, 2, 3):
            disk.errors = [OSError("no space")]
            checkpoints.record_step(step, initial_controllers(config.algo))
    assert (names(components), partials(components)) == ([], [])


def test_a_signal_waits_for_a_pending_checkpoint_before_it_saves(components, config, opened):
    config.save_every_steps, config.total_steps = 2, 9
    SlowDisk(components.policy)
    signal_handler = SignalHandler()
    with pytest.raises(RunInterrupted), opened(signal_handler) as checkpoints:
        checkpoints.record_warm_start_done()
        for step in (1, 2, 3):
            checkpoints.record_step(step, initial_controllers(config.algo))
        assert names(components) == []
        signal_handler.on_signal(signal.SIGUSR1)
    assert names(components) == ["step-000002", "step-000003"]


@pytest.mark.parametrize(
    ("error", "saved"),
    [
        (ValueError, ["step-000001"]),
        (AuxiliaryModelLostError, ["step-000001"]),
        (RankLostError, []),
        (KeyboardInterrupt, []),
    ],
)
def test_an_error_completes_a_pending_checkpoint_if_its_ranks_live(
    components, config, opened, error, saved
):
    config.save_every_steps, config.total_steps = 1, 9
    SlowDisk(components.policy)
    with pytest.raises(error), opened() as checkpoints:
        checkpoints.record_warm_start_done()
        checkpoints.record_step(1, initial_controllers(config.algo))
        raise error
    assert names(components) == saved


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_other_exceptions_save_no_checkpoint(components, config, opened, error):
    config.save_every_steps, config.total_steps = 0, 9
    with pytest.raises(error), opened() as checkpoints:
        checkpoints.record_warm_start_done()
        checkpoints.record_step(1, initial_controllers(config.algo))
        raise error
    assert components.policy.calls == []


def test_progress_is_restored_from_a_saved_state(components, config, opened):
    before = evaluate_validation_set(components, config)
    controllers = initial_controllers(config.algo)
    with opened() as checkpoints:
        checkpoints.record_warm_start_done()
        checkpoints.record_validation_before(before)
        checkpoints.record_step(config.total_steps, controllers)
        checkpoints.finish()
    again = opened(state=newest(components))
    restored = (again.step, again.controllers, again.validation_before)
    assert restored == (config.total_steps, controllers, before)
    logger_state = newest(components).logger_state
    fresh = opened(state=RunState(step=0, sampler_state={}, logger_state=logger_state))
    assert (fresh.step, fresh.controllers, fresh.validation_before) == (0, None, None)
