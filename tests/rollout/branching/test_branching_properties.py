"""The branch policy by name, and properties that hold for every way of branching.

The properties are those of section 8.2 of `algorithms.md`, on random scripted engines: texts,
entropies, calls and ends are drawn from the seed of the request.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.config.enums import Branching, ForkBudgetMode
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.rollout.branching.policy import (
    AepoBranching,
    AppoBranching,
    ArpoBranching,
    At2poBranching,
    NoBranching,
    make_branch_policy,
)
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.types.records import Role
from tests.fakes import (
    EOS,
    FakeGenerator,
    FakeRubric,
    FakeTools,
    make_context,
    make_prompt,
    turns,
    unit,
)
from tests.rollout.grown_trees import entropy_levels
from tests.rollout.virtual_time import run_virtually

WAYS = (
    Branching.after_result,
    Branching.aepo,
    Branching.at2po,
    Branching.appo,
    Branching.released,
)
AFTER_THE_ROOTS = (Branching.at2po, Branching.appo)
BY_THRESHOLD = tuple(way for way in WAYS if way not in AFTER_THE_ROOTS)
PROMPTS = [make_prompt("p0", question="Q0"), make_prompt("p1", question="Q1")]

branches = st.builds(
    BranchConfig,
    num_probe_tokens=st.integers(0, 12),
    num_forks_per_decision=st.integers(0, 3),
    initial_rollouts=st.one_of(st.none(), st.just(1)),
    consecutive_penalty=st.sampled_from([0.0, 0.05, 0.5]),
    fork_budget=st.sampled_from(ForkBudgetMode),
)
configs = st.builds(
    RolloutConfig,
    group_size=st.integers(1, 8),
    branching=st.sampled_from([*WAYS, Branching.none]),
    branch=branches,
    max_response_tokens=st.integers(1, 150),
    max_turns=st.integers(1, 5),
    max_tool_calls=st.integers(0, 3),
)
seeds = st.integers(0, 10_000)


def _collect(config, **options):
    context = make_context(config, **({"max_model_len": 140} | options))
    work = collect_rollouts(PROMPTS, FakeRubric(), context)
    return run_virtually(asyncio.wait_for(work, 20))


def _all(trees):
    return [one for tree in trees for one in tree.trajectories]


def _roomy(branching, num_trajectories, roots):
    """Where no trajectory comes near a limit."""
    return RolloutConfig(
        group_size=num_trajectories,
        branching=branching,
        branch=BranchConfig(initial_rollouts=roots, num_probe_tokens=4),
        max_response_tokens=5000,
        max_tool_calls=500,
        max_turns=900,
    )


def test_each_name_makes_its_policy():
    kinds = {name: type(make_branch_policy(RolloutConfig(branching=name))) for name in Branching}
    assert kinds == {
        Branching.none: NoBranching,
        Branching.after_result: ArpoBranching,
        Branching.aepo: AepoBranching,
        Branching.at2po: At2poBranching,
        Branching.appo: AppoBranching,
        Branching.released: NoBranching,
    }
    policy = make_branch_policy(RolloutConfig(branch=BranchConfig(num_probe_tokens=7)))
    assert policy.num_probe_tokens == 7


@settings(max_examples=60, deadline=None)
@given(configs, seeds, st.sampled_from([0.0, 0.2, 0.6]))
def test_n_trajectories_always_within_their_limits(config, seed, share):
    tools = FakeTools()
    generator = FakeGenerator(
        breaks=lambda request: unit("broken", request.seed) < share, delays=seed
    )
    trees = _collect(config, seed=seed, generator=generator, tools=tools)
    by_id = {one.trajectory_id: one for one in _all(trees)}
    assert len(by_id) == 2 * config.group_size
    for tree in trees:
        paths = [one.path for one in tree.trajectories]
        assert len(paths) == len(set(paths)) == config.group_size and paths == sorted(paths)
    for one in _all(trees):
        assert len(one.token_ids) <= min(config.max_response_tokens, 137)
        assert one.num_tool_calls <= config.max_tool_calls
        assert sum(turn.role is Role.assistant for turn in one.turns) <= config.max_turns
        _check_turns(one)
        if one.parent_id is not None:
            _check_fork(one, by_id[one.parent_id])
            in_turn = one.loss_mask[one.fork_len - 1] == 1
            assert not in_turn or config.branching is Branching.appo
    assert all(session.released == 1 for session in tools.sessions)
    num_copies = len(tools.sessions) - 2 * config.group_size  # at the starts of turns
    assert num_copies >= 0 if config.branching in AFTER_THE_ROOTS else num_copies == 0
    assert not generator.running


def _check_turns(one):
    """Turns tile the response; tokens of tools have loss mask, log-prob and entropy 0."""
    at = 0
    for index, turn in enumerate(one.turns):
        assert (turn.index, turn.start) == (index, at)
        at, span = turn.stop, slice(turn.start, turn.stop)
        is_sampled = int(turn.role is Role.assistant)
        assert one.loss_mask[span] == [is_sampled] * (turn.stop - turn.start)
        assert set(one.turn_ids[span]) <= {index}
        if not is_sampled:
            assert not any(one.logps[span]) and not any(one.entropies[span])
    assert at == len(one.token_ids)


def _check_fork(one, parent):
    """A fork has the tokens of its parent up to where it leaves."""
    size = one.fork_len
    assert parent.path == one.path[:-1] and size > 0
    for name in ("token_ids", "loss_mask", "logps", "entropies", "turn_ids"):
        assert getattr(one, name)[:size] == getattr(parent, name)[:size], name


@settings(max_examples=30, deadline=None)
@given(configs, seeds, st.integers(0, 100))
def test_two_identical_batches_make_identical_decisions_whatever_is_slow(config, seed, delays):
    config = replace(config, branch=replace(config.branch, fork_budget=ForkBudgetMode.partitioned))
    first = _collect(config, seed=seed)
    generator = FakeGenerator(delays=delays)
    again = _collect(config, seed=seed, generator=generator, tools=FakeTools(delays=delays + 1))
    assert [one.decisions for one in _all(first)] == [one.decisions for one in _all(again)]
    assert first == again == _collect(config, seed=seed, generator=generator)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(WAYS), st.integers(1, 6), seeds)
def test_as_many_roots_as_trajectories_are_plain_sampling(branching, num_trajectories, seed):
    options = {"seed": seed, "max_model_len": 6000}
    plain = _collect(_roomy(Branching.none, num_trajectories, None), **options)
    roots = _collect(_roomy(branching, num_trajectories, num_trajectories), **options)
    assert [one.token_ids for one in _all(plain)] == [one.token_ids for one in _all(roots)]
    assert [one.stop_reason for one in _all(plain)] == [one.stop_reason for one in _all(roots)]
    assert all(tree.num_forks == tree.num_extra_roots == 0 for tree in (*plain, *roots))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(BY_THRESHOLD), seeds, st.floats(0.4, 0.7))
def test_without_a_weight_entropies_do_not_matter(branching, seed, alpha):
    config = _roomy(branching, 6, 2)
    weightless = BranchConfig(initial_rollouts=2, num_probe_tokens=8, alpha=alpha, beta=0.0)
    config = replace(config, branch=weightless, max_response_tokens=150)
    calm = FakeGenerator(entropy=lambda response, request: 0.1)
    wild = FakeGenerator(entropy=lambda response, request: 5 * unit(response))
    trees = [
        [
            (one.path, one.token_ids, one.fork_len)
            for one in _all(_collect(config, seed=seed, generator=generator))
        ]
        for generator in (calm, wild)
    ]
    assert trees[0] == trees[1]


@pytest.mark.parametrize("branching", BY_THRESHOLD)
def test_with_a_weight_higher_entropies_raise_the_fork_probability(branching):
    config = _roomy(branching, 6, 2)
    highest = []
    for level in (0.1, 4.0):
        # Behind the first answer entropies fall or rise, in the probe and in the whole segment.
        generator = FakeGenerator(
            turns(*["thinkhard<search>q1</search>"] * 3, f"done{EOS}"),
            entropy=entropy_levels(1.0, level),
        )
        trees = _collect(config, generator=generator, max_model_len=6000)
        decisions = [decision for one in _all(trees) for decision in one.decisions]
        highest.append(max(decision.probability for decision in decisions))
    assert highest[0] <= 0.5 < highest[1]


@pytest.mark.parametrize("branching", [Branching.after_result, Branching.aepo])
def test_without_probe_tokens_nothing_is_asked(branching):
    config = _roomy(branching, 4, 2)
    config = replace(config, branch=replace(config.branch, num_probe_tokens=0), max_tool_calls=3)
    trees = _collect(config, max_model_len=6000)
    plain = replace(config, branching=Branching.none)
    assert trees == _collect(plain, max_model_len=6000)
    assert any(one.num_tool_calls for one in _all(trees))


def test_greedy_never_branches():
    for branching in WAYS:
        generator = FakeGenerator(turns("thinkhard<search>q1</search>", f"done{EOS}"))
        trees = _collect(_roomy(branching, 4, 1), generator=generator, temperature=0.0)
        assert all(tree.num_forks == 0 and len(tree.trajectories) == 4 for tree in trees)


def test_one_path_may_take_every_slot_of_a_shared_budget():
    def entropy(response, request):
        wild = request.request_id.split("/")[2][0] == "0" and "</result>" in response
        return 3.0 if wild else 1.0

    for budget, forks, extra_roots in (
        (ForkBudgetMode.partitioned, 2, 2),
        (ForkBudgetMode.first_come, 4, 0),
    ):
        config = _roomy(Branching.after_result, 6, 2)
        config = replace(config, branch=replace(config.branch, fork_budget=budget))
        generator = FakeGenerator(
            turns(*["thinkhard<search>q1</search>"] * 4, f"done and over{EOS}"), entropy=entropy
        )
        for tree in _collect(config, generator=generator, max_model_len=6000):
            assert (tree.num_forks, tree.num_extra_roots) == (forks, extra_roots)
            assert all(one.path[0] == 0 for one in tree.trajectories if len(one.path) > 1)
