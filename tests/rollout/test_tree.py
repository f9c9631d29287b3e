"""Always M trajectories, whatever forks, fails or is slow."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.rollout.tree import sample_tree
from mega_agentrl.types.records import Role
from tests.fakes import EOS, FakeGenerator, FakeTools, make_context, make_prompt, turns
from tests.rollout.virtual_time import run_virtually

CALL = "<search>q1</search>"
END = f"<answer>1</answer>{EOS}"

configs = st.builds(
    RolloutConfig,
    group_size=st.integers(1, 9),
    branching=st.sampled_from([Branching.none, Branching.after_result, Branching.aepo]),
    branch=st.builds(
        BranchConfig,
        num_probe_tokens=st.integers(1, 12),
        num_forks_per_decision=st.integers(1, 3),
        initial_rollouts=st.one_of(st.none(), st.just(1)),
    ),
    max_response_tokens=st.integers(1, 150),
    max_turns=st.integers(1, 4),
    max_tool_calls=st.integers(0, 3),
)


def _context(config, generator, tools, *, seed=1, max_model_len=140):
    return make_context(
        config,
        generator=generator,
        tools=tools,
        max_model_len=max_model_len,
        seed=seed,
    )


def _grow(config, *, seed=1, generator=None, tools=None):
    context = _context(config, generator or FakeGenerator(), tools or FakeTools(), seed=seed)
    return run_virtually(asyncio.wait_for(sample_tree(context, make_prompt(), "p0"), 20))


def _check_tree(tree, config, tools):
    paths = [trajectory.path for trajectory in tree.trajectories]
    assert len(paths) == config.group_size == len(set(paths))
    assert paths == sorted(paths)
    by_id = {trajectory.trajectory_id: trajectory for trajectory in tree.trajectories}
    limit = min(config.max_response_tokens, 140 - len(tree.prompt.token_ids))
    for one in tree.trajectories:
        assert len(one.token_ids) <= limit
        assert one.num_tool_calls <= config.max_tool_calls
        assert sum(turn.role is Role.assistant for turn in one.turns) <= config.max_turns
        _check_turns(one)
        if one.parent_id is not None:
            parent = by_id[one.parent_id]
            assert parent.path == one.path[:-1] and one.fork_len > 0
            for name in ("token_ids", "loss_mask", "logps", "entropies", "turn_ids"):
                size = one.fork_len
                assert getattr(one, name)[:size] == getattr(parent, name)[:size], name
            assert one.loss_mask[one.fork_len - 1] == 0, "a fork starts right behind an answer"
            assert one.baseline_entropy == parent.baseline_entropy
    assert all(session.released == 1 for session in tools.sessions)
    assert len(tools.sessions) == config.group_size


def _check_turns(trajectory):
    """Turns tile the response; tool tokens have mask, log-prob and entropy 0."""
    at = 0
    for index, turn in enumerate(trajectory.turns):
        assert (turn.index, turn.start) == (index, at)
        at = turn.stop
        said = int(turn.role is Role.assistant)
        span = slice(turn.start, turn.stop)
        assert trajectory.loss_mask[span] == [said] * (turn.stop - turn.start)
        assert set(trajectory.turn_ids[span]) <= {index}
        if not said:
            assert not any(trajectory.logps[span]) and not any(trajectory.entropies[span])
    assert at == len(trajectory.token_ids)


@settings(max_examples=60, deadline=None)
@given(configs, st.integers(0, 10_000))
def test_any_configuration_gives_m_sound_trajectories(config, seed):
    tools = FakeTools()
    _check_tree(_grow(config, seed=seed, tools=tools), config, tools)


@settings(max_examples=15, deadline=None)
@given(configs, st.integers(0, 10_000), st.integers(0, 100))
def test_scheduling_does_not_change_the_tree(config, seed, delays):
    plain = _grow(config, seed=seed)
    again = _grow(config, seed=seed)
    shuffled = _grow(
        config,
        seed=seed,
        generator=FakeGenerator(delays=delays),
        tools=FakeTools(delays=delays + 1),
    )
    assert plain == again == shuffled


@settings(max_examples=15, deadline=None)
@given(configs, st.integers(0, 10_000))
def test_no_branching_is_plain_sampling(config, seed):
    plain = _grow(replace(config, branching=Branching.none), seed=seed)
    assert plain.num_forks == plain.num_top_ups == 0
    assert [one.path for one in plain.trajectories] == [
        (index,) for index in range(config.group_size)
    ]
    # As many roots as trajectories leave nothing to fork: the same samples.
    branch = replace(config.branch, initial_rollouts=config.group_size)
    roots = _grow(replace(config, branching=Branching.after_result, branch=branch), seed=seed)
    assert [one.token_ids for one in roots.trajectories] == [
        one.token_ids for one in plain.trajectories
    ]


@settings(max_examples=30, deadline=None)
@given(configs, st.integers(0, 10_000), st.floats(0, 0.6))
def test_a_flaky_engine_changes_no_count(config, seed, share):
    def breaks(request):
        return (request.seed % 1000) / 1000 < share

    tools = FakeTools()
    generator = FakeGenerator(breaks=breaks, delays=seed)
    tree = _grow(config, seed=seed, generator=generator, tools=tools)
    _check_tree(tree, config, tools)


def _excited(response, request):
    return 2.0 if "</result>" in response else 1.0


def _config(**changes):
    branch = BranchConfig(num_probe_tokens=8, initial_rollouts=changes.pop("roots", None))
    return RolloutConfig(branch=branch, max_response_tokens=130, **changes)


def test_every_slot_is_forked_where_entropy_always_rises():
    generator = FakeGenerator(turns("thinkhard" + CALL, "more words" + END), entropy=_excited)
    tree = _grow(_config(group_size=8), generator=generator)
    assert tree.num_forks == 4 and tree.num_top_ups == 0
    assert [one.path for one in tree.trajectories] == [
        path for root in range(4) for path in ((root,), (root, 0))
    ]


def test_a_path_that_forked_shares_its_slots_with_the_fork():
    # One root with 3 slots: the first answer costs one, the two paths get one each.
    writes = turns("thinkhard" + CALL, "more words" + CALL, "more words" + END)
    tree = _grow(_config(group_size=4, roots=1), generator=FakeGenerator(writes, entropy=_excited))
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
    tree = _grow(_config(group_size=6, roots=1), generator=generator)
    assert tree.num_top_ups == 5 and tree.num_forks == 0
    assert [one.path for one in tree.trajectories] == [(index,) for index in range(6)]
    assert generator.most >= 5


@pytest.mark.parametrize("num_requests", [0, 1, 4, 6, 9, 12])
async def test_cancelling_a_tree_releases_every_session(num_requests):
    generator = FakeGenerator(
        turns("thinkhard" + CALL, "more words" + END), entropy=_excited, delays=1
    )
    tools = FakeTools(delays=2)
    context = _context(_config(group_size=8), generator, tools)
    task = asyncio.create_task(sample_tree(context, make_prompt(), "p0"))
    while len(generator.requests) < num_requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert all(session.released >= 1 for session in tools.sessions)
    assert not generator.running
