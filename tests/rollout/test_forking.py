"""`rollout.forking`: decisions, what they cost, and copies that fail alone or not at all."""

from __future__ import annotations

import asyncio

import pytest

from mega_agentrl.config.schema import BranchConfig
from mega_agentrl.rollout.branching import AfterResult, NoBranching, Pool, Share
from mega_agentrl.rollout.forking import Forks, copy_of
from tests.fakes import FakeTools

EXCITED, CALM = [2.0] * 6, [0.5] * 6


def test_every_decision_is_kept_and_paid_for():
    forks = Forks(AfterResult(BranchConfig()), (1,), Share(2), streak=0)
    assert forks.ask(5, 1.0, CALM) == () and forks.streak == 0 and forks.left == 2
    (budget,) = forks.ask(9, 1.0, EXCITED)
    assert (forks.streak, forks.left, budget.left) == (1, 1, 0)
    (budget,) = forks.ask(12, 1.0, EXCITED)
    assert (forks.streak, forks.left, budget.left) == (2, 0, 0)
    assert forks.ask(15, 1.0, EXCITED) == () and forks.streak == 0
    assert [(one.at, one.slots, one.num_forks) for one in forks.decisions] == [
        (5, 2, 0),
        (9, 2, 1),
        (12, 1, 1),
        (15, 0, 0),
    ]
    assert forks.decisions[1].probability == pytest.approx(0.5 + 0.2 * 1.0)
    assert forks.decisions[1].threshold == 0.5 and forks.decisions[0].path == (1,)


def test_a_pool_is_shared_and_a_policy_without_a_law_never_forks():
    pool = Pool(1)
    first, second = (Forks(AfterResult(BranchConfig()), (i,), pool, 0) for i in range(2))
    assert first.ask(1, 1.0, EXCITED) == [pool] and second.left == 0
    assert Forks(NoBranching(), (0,), Share(3), 0).ask(1, 1.0, EXCITED) == ()


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
    session = tools.open()
    await session.create({})
    return session, tools


async def test_tools_and_user_are_copied_or_replaced_by_their_fault():
    session, _ = await _session()
    copy, user = await copy_of(session, None, "t")
    assert copy is not session and user is None
    fault, other = RuntimeError("no line"), User()
    assert (await copy_of(session, User(fault), "t"))[1] is fault
    assert (await copy_of(session, User(other), "t"))[1] is other
    session, _ = await _session(fork_fails=True)
    assert isinstance((await copy_of(session, None, "t"))[0], RuntimeError)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyError("bug")])
async def test_what_ends_the_copy_of_the_user_leaves_no_tools_behind(error):
    session, tools = await _session()
    with pytest.raises(type(error)):
        await copy_of(session, User(error), "t")
    assert [one.released for one in tools.sessions] == [0, 1]
