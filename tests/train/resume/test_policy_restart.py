"""A policy that is lost at any moment comes back in place, and the run ends as if undisturbed."""

from functools import partial

import pytest

from mega_agentrl.train.resume.policy_restart import MAX_FAILURES_WITHOUT_PROGRESS
from mega_agentrl.types.errors import RankLostError
from tests.train.interruptible_run import Moments, make_config, outcome, start

pytestmark = pytest.mark.usefixtures("bare_runs")


def lose():
    raise RankLostError("policy rank 1 died")


@pytest.mark.parametrize(
    ("warm", "critic"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_lost_at_any_moment_it_ends_as_if_undisturbed(config, tmp_path, warm, critic):
    moments = Moments()
    make = partial(make_config, config, warm=warm, ares=False, critic=critic)
    components = start(make(tmp_path / "whole"), moments)
    assert components.policy.num_restarts == 0
    expected = outcome(make(tmp_path / "whole"), components)
    # A policy that is lost says so when it is asked for something.
    others = ("generate", "critic", "critic saved")
    chosen = [at for at, name in enumerate(moments.names) if name not in others]
    assert len(chosen) > 15
    for at in chosen:
        settings = make(tmp_path / f"lost-{at}")
        components = start(settings, Moments(at, lose))
        assert components.policy.num_restarts == 1
        assert outcome(settings, components) == expected, (
            f"lost at moment {at}, {moments.names[at]}"
        )


def test_a_policy_that_always_dies_at_the_same_place_is_given_up(config, tmp_path, capsys):
    moments = Moments()
    moments.pass_by = lambda name: lose() if name == "update" else None
    settings = make_config(config, tmp_path / "run", warm=False, ares=False)
    with pytest.raises(RankLostError, match="rank 1 died"):
        start(settings, moments)
    assert (
        capsys.readouterr().err.count("restarted from the beginning")
        == MAX_FAILURES_WITHOUT_PROGRESS - 1
    )
