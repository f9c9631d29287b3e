"""`rollout.context`: what is shared is shared, and what is said once is said once a pass."""

from __future__ import annotations

import asyncio

from mega_agentrl.config.schema import RolloutConfig
from mega_agentrl.rollout.branching import NoBranching
from mega_agentrl.rollout.context import FAULTS, RolloutContext, State
from mega_agentrl.types.faults import ToolFault
from tests.fakes import CharCodec, FakeGenerator, FakeTools


def _context():
    return RolloutContext(
        generator=FakeGenerator(),
        tools=FakeTools(),
        codec=CharCodec(),
        policy=NoBranching(),
        config=RolloutConfig(),
        temperature=1.0,
        max_model_len=10,
        seed=1,
        step=0,
    )


def test_every_pass_has_warnings_of_its_own():
    first, second = _context(), _context()
    first.warned.add("template")
    assert second.warned == set() and first.interactions is None


def test_faults_are_ours_and_bugs_and_cancellation_are_not():
    assert issubclass(ToolFault, FAULTS) and issubclass(TimeoutError, FAULTS)
    for bug in (ValueError, KeyError, AssertionError, TypeError, asyncio.CancelledError):
        assert not issubclass(bug, FAULTS)


def test_a_trajectory_ends_in_one_of_two_states():
    assert [*State][-2:] == [State.completed, State.failed]
