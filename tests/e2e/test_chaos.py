"""One kill of each kind in one run, which ends as the run that nobody disturbed."""

import pytest

from tests.e2e.overrides import asset_overrides
from tools.chaos import SETTINGS
from tools.chaos_parts.outcome import differences, read_outcome
from tools.chaos_parts.run import ChaosRun, PlannedKill

PLAN = [
    PlannedKill("actor", step=1, delay_s=0.5),
    PlannedKill("driver", step=2, delay_s=0.3),
    PlannedKill("engine", step=4, delay_s=0.2),
    PlannedKill("sandbox", step=5, delay_s=0.1),
]
STEPS = 6


@pytest.mark.slow(240)
@pytest.mark.timeout(1600)
def test_a_run_that_loses_one_of_each_kind_ends_as_if_undisturbed(assets, tmp_path):
    inputs = [one for one in asset_overrides(assets, "") if not one.startswith("run_dir=")]
    settings = [*SETTINGS, *inputs, f"total_steps={STEPS}"]
    whole = ChaosRun(tmp_path / "whole", settings, []).run(600)
    story = ChaosRun(tmp_path / "disturbed", settings, PLAN).run(900)
    expected, found = read_outcome(whole.folder), read_outcome(story.folder)
    assert [blow for _, blow in story.executed_kills] == PLAN
    assert story.num_failures == 0, "all but the driver mends by itself"
    assert len(expected.losses) == STEPS
    assert any(expected.losses[:4]), "losses of nothing learned say nothing"
    assert differences(expected, found) == []
    # A sandbox that was in use when its host died leaves a gap, but not before that.
    assert found.num_compared >= 4
    for one in (whole, story):
        assert not one.leftover_processes, "processes outlive the run"
