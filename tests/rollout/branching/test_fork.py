"""Fork decisions and their cost, and copies of sessions that fail alone."""

from __future__ import annotations

import asyncio

import pytest

from mega_agentrl.config.sections.rollout import BranchConfig
from mega_agentrl.rollout.branching.fork import ForkDecider, fork_sessions
from mega_agentrl.rollout.branching.policy import (
    ArpoBranching,
    NoBranching,
    PathBudget,
    SharedBudget,
)
from mega_agentrl.types.records import Role
from tests.fakes import FakeTools

EXCITED, CALM = [2.0] * 6, [0.5] * 6


def test_every_decision_is_recorded_and_paid_for():
    own = PathBudget(2)
    decider = ForkDecider(ArpoBranching(BranchConfig()), (1,), own, num_consecutive_forks=0)
    assert decider.decide(5, 1.0, CALM) == ()
    assert (decider.num_consecutive_forks, own.num_left) == (0, 2)
    (budget,) = decider.decide(9, 1.0, EXCITED)
    assert (decider.num_consecutive_forks, own.num_left, budget.num_left) == (1, 1, 0)
    (budget,) = decider.decide(12, 1.0, EXCITED)
    assert (decider.num_consecutive_forks, own.num_left, budget.num_left) == (2, 0, 0)
    assert decider.decide(15, 1.0, EXCITED) == () and decider.num_consecutive_forks == 0
    assert [(one.position, one.num_slots_left, one.num_forks) for one in decider.decisions] == [
        (5, 2, 0),
        (9, 2, 1),
        (12, 1, 1),
        (15, 0, 0),
    ]
    assert decider.decisions[1].probability == pytest.approx(0.5 + 0.2 * 1.0)
    assert decider.decisions[1].threshold == 0.5 and decider.decisions[0].path == (1,)


def test_a_shared_budget_is_shared():
    shared = SharedBudget(1)
    first, second = (ForkDecider(ArpoBranching(BranchConfig()), (i,), shared, 0) for i in range(2))
    assert second.num_probe_tokens(1, Role.tool) == 20
    assert first.decide(1, 1.0, EXCITED) == [shared] and second.decide(1, 1.0, EXCITED) == ()
    assert second.num_probe_tokens(1, Role.tool) == 0, "no slots, no question"


@pytest.mark.parametrize(
    ("policy", "role", "num_tokens"),
    [
        (ArpoBranching(BranchConfig(num_probe_tokens=7)), Role.tool, 7),
        (ArpoBranching(BranchConfig(num_probe_tokens=7)), Role.user, 0),
        (ArpoBranching(BranchConfig(num_probe_tokens=7, after_user_messages=True)), Role.user, 7),
        (ArpoBranching(BranchConfig(num_probe_tokens=0)), Role.tool, 0),
        (NoBranching(), Role.tool, 0),
    ],
    ids=["after_tool", "after_user", "after_user_if_set", "zero_probe_tokens", "no_branching"],
)
def test_policies_probe_after_the_roles_they_fork_at(policy, role, num_tokens):
    assert ForkDecider(policy, (0,), PathBudget(3), 0).num_probe_tokens(9, role) == num_tokens


class User:
    """Forks as it is told."""

    def __init__(self, result=None):
        self.result = result

    async def fork(self):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


async def _session(**options):
    tools = FakeTools(**options)
    session = tools.open_session()
    await session.create({})
    return session, tools


async def test_tools_and_user_are_copied_or_replaced_by_the_error():
    session, _ = await _session()
    copy, user = await fork_sessions(session, None, "t")
    assert copy is not session and user is None
    fault, other = RuntimeError("no line"), User()
    assert (await fork_sessions(session, User(fault), "t"))[1] is fault
    assert (await fork_sessions(session, User(other), "t"))[1] is other
    session, _ = await _session(fork_fails=True)
    assert isinstance((await fork_sessions(session, None, "t"))[0], RuntimeError)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyError("bug")])
async def test_an_error_while_the_user_is_forked_releases_the_tools(error):
    session, tools = await _session()
    with pytest.raises(type(error)):
        await fork_sessions(session, User(error), "t")
    assert [one.released for one in tools.sessions] == [0, 1]
