"""Forks, extra roots and cancellation of one tree by hand.

Properties of any tree are in `branching/test_branching_properties.py`.
"""

from __future__ import annotations

import asyncio

import pytest

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.rollout.tree import sample_tree
from tests.fakes import FakeGenerator, FakeTools, make_context, make_prompt, turns
from tests.rollout.grown_trees import CALL, END, entropy_levels
from tests.rollout.virtual_time import run_virtually

RISE = entropy_levels(1.0, 2.0)


def _grow(config, generator):
    context = make_context(config, generator=generator, max_model_len=140)
    return run_virtually(asyncio.wait_for(sample_tree(context, make_prompt(), "p0"), 20))


def _config(**changes):
    branch = BranchConfig(num_probe_tokens=8, initial_rollouts=changes.pop("roots", None))
    return RolloutConfig(branch=branch, max_response_tokens=130, **changes)


def test_every_slot_is_forked_where_entropy_always_rises():
    generator = FakeGenerator(turns("thinkhard" + CALL, "more words" + END), entropy=RISE)
    tree = _grow(_config(group_size=8), generator)
    assert tree.num_forks == 4 and tree.num_extra_roots == 0
    assert [one.path for one in tree.trajectories] == [
        path for root in range(4) for path in ((root,), (root, 0))
    ]


def test_a_path_that_forked_shares_its_slots_with_the_fork():
    # One root with 3 slots: the first answer costs one, the two paths get one each.
    writes = turns("thinkhard" + CALL, "more words" + CALL, "more words" + END)
    tree = _grow(_config(group_size=4, roots=1), FakeGenerator(writes, entropy=RISE))
    assert [one.path for one in tree.trajectories] == [(0,), (0, 0), (0, 0, 0), (0, 1)]
    first, _, nested, second = tree.trajectories
    assert nested.fork_len == second.fork_len > tree.trajectories[1].fork_len
    assert nested.parent_id == tree.trajectories[1].trajectory_id
    assert second.parent_id == first.trajectory_id


def test_unused_slots_become_fresh_roots_at_once():
    class Counting(FakeGenerator):
        most = 0

        async def generate(self, request):
            result = super().generate(request)
            await asyncio.sleep(0)
            self.most = max(self.most, len(self.running) + 1)
            return await result

    generator = Counting(turns(END), delays=3)
    tree = _grow(_config(group_size=6, roots=1), generator)
    assert tree.num_extra_roots == 5 and tree.num_forks == 0
    assert [one.path for one in tree.trajectories] == [(index,) for index in range(6)]
    assert generator.most >= 5


@pytest.mark.parametrize("branching", [Branching.after_result, Branching.at2po, Branching.appo])
@pytest.mark.parametrize("num_requests", [0, 1, 4, 6, 9, 12])
async def test_cancelling_a_tree_releases_every_session(num_requests, branching):
    writes = turns("thinkhard" + CALL, "more words" + END)
    generator, tools = FakeGenerator(writes, entropy=RISE, delays=1), FakeTools(delays=2)
    config = _config(group_size=8, branching=branching)
    context = make_context(config, generator=generator, tools=tools, max_model_len=140)
    task = asyncio.create_task(sample_tree(context, make_prompt(), "p0"))
    while len(generator.requests) < num_requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 300)
    assert all(session.released >= 1 for session in tools.sessions)
    assert not generator.running
