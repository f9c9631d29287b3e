"""Contexts share no warnings, and infrastructure errors are told from bugs."""

from __future__ import annotations

import asyncio

from mega_agentrl.config.schema import RolloutConfig
from mega_agentrl.rollout.branching.policy import NoBranching
from mega_agentrl.rollout.context import INFRA_ERRORS, RolloutContext, TrajectoryState
from mega_agentrl.types.errors import ToolSessionError
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
    first.emitted_warnings.add("template")
    assert second.emitted_warnings == set() and first.interactions is None


def test_infra_errors_exclude_bugs_and_cancellation():
    assert issubclass(ToolSessionError, INFRA_ERRORS) and issubclass(TimeoutError, INFRA_ERRORS)
    for bug in (ValueError, KeyError, AssertionError, TypeError, asyncio.CancelledError):
        assert not issubclass(bug, INFRA_ERRORS)


def test_a_trajectory_ends_in_one_of_two_states():
    assert [*TrajectoryState][-2:] == [TrajectoryState.completed, TrajectoryState.failed]
