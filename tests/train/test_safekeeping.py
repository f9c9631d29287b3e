"""When a pause is saved, what is in it, and what is not saved at all."""

import signal

import pytest

from mega_agentrl.data.sampler import PromptSampler
from mega_agentrl.train import run_state
from mega_agentrl.train.controllers import start
from mega_agentrl.train.evaluate import evaluate_held_out
from mega_agentrl.train.run_state import RunState
from mega_agentrl.train.safekeeping import Safekeeping
from mega_agentrl.train.session import Session
from mega_agentrl.train.stopping import Stopped, Stopper


@pytest.fixture
def opened(parts, config):
    """Makes a `Safekeeping` of the run, at its beginning or from a state."""
    parts.prompts = PromptSampler(parts.validation, seed=1)
    with Session(parts.run_dir, config) as session:
        yield lambda stopper=None, state=None: Safekeeping(
            parts, config, session, stopper or Stopper(), state
        )


def names(parts):
    return sorted(path.name for path in run_state.whole_ones(parts.run_dir))


def newest(parts):
    return run_state.restore(parts.policy, run_state.whole_ones(parts.run_dir)[0])


@pytest.mark.parametrize(
    ("every", "total", "saved"), [(2, 5, [2, 4, 5]), (0, 3, [3]), (1, 2, [1, 2]), (9, 9, [9])]
)
def test_checkpoints_come_every_so_often_and_at_the_end(parts, config, opened, every, total, saved):
    config.save_every, config.total_steps, parts.demonstrations = every, total, None
    with opened() as kept:
        kept.started()
        for step in range(1, total + 1):
            kept.stepped(step, start(config.algo))
            assert kept.step == step
    assert parts.policy.verbs == [f"save step-{step:06d}" for step in saved]


def test_behind_a_warm_start_there_is_a_checkpoint_that_stays(parts, config, opened):
    config.save_every, config.total_steps = 1, 4
    with opened() as kept:
        kept.started()
        for step in range(1, 5):
            kept.stepped(step, start(config.algo))
    assert names(parts) == ["step-000000", "step-000003", "step-000004"]
    assert (parts.run_dir / "start" / "step-000000" / "manifest.json").exists()


def test_a_stop_saves_the_last_pause_and_not_what_came_after_it(parts, config, opened):
    config.save_every, config.total_steps, parts.demonstrations = 0, 9, None
    parts.generator.version = 4
    stopper = Stopper()
    with pytest.raises(Stopped), opened(stopper) as kept:
        kept.started()
        kept.evaluated(evaluate_held_out(parts, config))
        parts.prompts.settle(parts.prompts.next(3))
        kept.stepped(1, start(config.algo))
        at_pause = parts.prompts.state_dict()
        parts.prompts.next(2)
        stopper.on_signal(signal.SIGTERM)
    state = newest(parts)
    assert (state.step, state.version) == (1, 4)
    assert state.sampler == at_pause != parts.prompts.state_dict()
    assert state.controllers == start(config.algo).to_plain()
    assert set(state.before) == {"sampled", "greedy"}
    assert state.session["curve"] == []


def test_what_is_saved_already_is_not_saved_again(parts, config, opened):
    config.save_every, config.total_steps = 1, 9
    for state in (None, "saved"):
        stopper = Stopper()
        taken = newest(parts) if state else None
        with pytest.raises(Stopped), opened(stopper, taken) as kept:
            if taken is None:
                kept.started()
                kept.stepped(1, start(config.algo))
            assert kept.step == 1
            stopper.on_signal(signal.SIGTERM)
    assert parts.policy.verbs == ["save step-000000", "save step-000001"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_end_that_is_no_stop_saves_nothing(parts, config, opened, error):
    config.save_every, config.total_steps, parts.demonstrations = 0, 9, None
    with pytest.raises(error), opened() as kept:
        kept.started()
        kept.stepped(1, start(config.algo))
        raise error
    assert parts.policy.verbs == []


def test_a_state_gives_everything_back(parts, config, opened):
    parts.demonstrations = None
    before = evaluate_held_out(parts, config)
    controllers = start(config.algo)
    with opened() as kept:
        kept.started()
        kept.evaluated(before)
        kept.stepped(config.total_steps, controllers)
    again = opened(state=newest(parts))
    assert (again.step, again.controllers, again.before) == (
        config.total_steps,
        controllers,
        before,
    )
    fresh = opened(
        state=RunState(step=0, controllers={}, sampler={}, session=newest(parts).session)
    )
    assert (fresh.step, fresh.controllers, fresh.before) == (0, None, None)
