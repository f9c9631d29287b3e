"""Branch policies at their threshold, AEPO's roots and penalty, and fork budgets that add up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.config.enums import Branching, ForkBudgetMode
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.rollout.branching.policy import (
    AepoBranching,
    ArpoBranching,
    BranchPolicy,
    ForkPoint,
    NoBranching,
    PathBudget,
    SharedBudget,
    TurnStart,
    make_root_budgets,
    split_evenly,
)
from mega_agentrl.rollout.tree import sample_tree
from mega_agentrl.types.records import Role
from tests.config.refusals import refused
from tests.fakes import FakeGenerator, FakeTools, make_context, make_prompt, turns
from tests.rollout.grown_trees import CALL, END, entropy_levels
from tests.rollout.virtual_time import run_virtually


def _point(entropies, baseline=1.0, slots=8):
    return ForkPoint(path=(0,), num_slots=slots, baseline=baseline, probe_entropies=entropies)


@pytest.mark.parametrize(("entropy", "forks"), [(1.0, 0), (1.05, 1), (0.5, 0), (3.0, 1)])
def test_forks_only_when_entropy_rose(entropy, forks):
    assert ArpoBranching(BranchConfig()).num_forks(_point([entropy] * 20)) == forks


def test_the_probability_rises_with_the_entropy_over_the_baseline():
    policy = ArpoBranching(BranchConfig(alpha=0.4, beta=0.3, tau=0.7))
    assert policy.probability(_point([3.0] * 20)) == pytest.approx(0.4 + 0.3 * 2)
    assert policy.probability(_point([3.0] * 4)) is None and policy.threshold == 0.7
    assert not policy.needs_monitor_root(8)


def test_only_the_first_k_tokens_count_and_five_are_needed():
    policy = ArpoBranching(BranchConfig())
    assert policy.baseline_entropy([1.0] * 20 + [100.0]) == 1.0
    assert policy.baseline_entropy([1.0, 2.0, 3.0, 4.0, 5.0]) == 3.0
    assert policy.baseline_entropy([1.0] * 4) is None
    assert policy.num_forks(_point([9.0] * 4)) == 0
    assert policy.num_forks(_point([9.0] * 5)) == 1


def test_forks_are_bounded_by_the_slots():
    policy = ArpoBranching(BranchConfig(num_forks_per_decision=3))
    assert policy.num_forks(_point([9.0] * 20)) == 3
    assert policy.num_forks(_point([9.0] * 20, slots=2)) == 2


@pytest.mark.parametrize(
    ("num_trajectories", "roots", "slots"),
    [
        (8, None, (1, 1, 1, 1)),
        (8, 3, (2, 2, 1)),
        (7, None, (2, 1, 1)),
        (1, None, (0,)),
        (4, 4, (0,) * 4),
    ],
)
def test_fork_slots_are_split_over_the_roots(num_trajectories, roots, slots):
    policy = ArpoBranching(BranchConfig(initial_rollouts=roots))
    assert policy.fork_slots(num_trajectories) == slots


def test_more_roots_than_trajectories_is_an_error():
    error = refused(ArpoBranching(BranchConfig(initial_rollouts=9)).fork_slots, 8)
    assert (error.key, error.got) == ("rollout.branch.initial_rollouts", 9)


NO_PROBE = BranchConfig(num_probe_tokens=0)


@pytest.mark.parametrize(
    "policy",
    [NoBranching(), ArpoBranching(NO_PROBE), AepoBranching(NO_PROBE)],
    ids=["none", "arpo", "aepo"],
)
def test_a_policy_that_never_asks_is_independent_roots(policy):
    assert policy.fork_slots(3) == (0, 0, 0) and policy.num_probe_tokens == 0
    assert policy.baseline_entropy([1.0] * 20) is None and policy.num_forks(_point([9.0] * 20)) == 0
    assert policy.probability(_point([9.0] * 20)) is None
    assert not policy.needs_monitor_root(8)


def test_an_own_rule_needs_only_the_number_of_forks():
    class Always(BranchPolicy):
        def num_forks(self, point):
            return point.num_slots

    policy = Always(BranchConfig(initial_rollouts=2))
    assert policy.num_forks(_point([0.0])) == 8 and policy.fork_slots(8) == (3, 3)
    start = TurnStart(path=(0,), position=9, previous_role=Role.tool, num_slots=1)
    assert policy.asks_at(start) and not policy.asks_at(replace(start, previous_role=Role.user))
    assert policy.probability(_point([0.0])) is policy.threshold is None
    assert not policy.needs_monitor_root(8) and policy.baseline_entropy([1.0] * 20) == 1.0


@given(st.integers(0, 100), st.integers(1, 20))
def test_split_keeps_the_sum_and_favours_the_first(total, num_parts):
    parts = split_evenly(total, num_parts)
    assert len(parts) == num_parts and sum(parts) == total
    assert sorted(parts, reverse=True) == list(parts) and parts[0] - parts[-1] <= 1


def test_a_path_budget_is_split_in_path_order_and_a_shared_one_is_not():
    budget = PathBudget(6)
    children = budget.spend(2)
    assert budget.num_left == 2 and children == [PathBudget(1), PathBudget(1)]
    shared = SharedBudget(6)
    (child,) = shared.spend(1)
    assert child is shared and child.spend(3) == [shared] * 3 and shared.num_left == 2


def test_budgets_are_one_for_each_root_or_one_for_all():
    assert make_root_budgets(ForkBudgetMode.partitioned, (2, 1)) == [PathBudget(2), PathBudget(1)]
    first, second = make_root_budgets(ForkBudgetMode.first_come, (2, 1))
    assert first is second and first.num_left == 3
    assert make_root_budgets(ForkBudgetMode.first_come, ()) == []


TALK = turns("thinkhard" + CALL, "more words" + CALL, "and so on" + CALL, "at last" + END)


def _grow(generator, *, num_trajectories=12, branching=Branching.aepo, tools=None, **branch):
    config = RolloutConfig(
        group_size=num_trajectories,
        branching=branching,
        branch=BranchConfig(num_probe_tokens=8, **branch),
        max_tool_calls=9,
        max_turns=20,
        max_response_tokens=400,
    )
    context = make_context(config, generator=generator, tools=tools or FakeTools())
    return run_virtually(asyncio.wait_for(sample_tree(context, make_prompt(), "p0"), 20))


def _roots(tree):
    return sum(len(one.path) == 1 for one in tree.trajectories)


@pytest.mark.parametrize(
    ("num_consecutive_forks", "entropy", "p", "forks"),
    [
        (0, 1.1, 0.52, 1),  # .5 + .2 * .1
        (1, 1.1, 0.52 * 0.95, 0),
        (1, 2.0, 0.7 * 0.95, 1),
        (5, 2.0, 0.7 * 0.75, 1),
        (6, 2.0, 0.7 * 0.70, 0),
        (20, 99.0, 0.0, 0),
    ],
)
def test_probability_falls_with_consecutive_forks(num_consecutive_forks, entropy, p, forks):
    point = replace(_point([entropy] * 20), num_consecutive_forks=num_consecutive_forks)
    policy = AepoBranching(BranchConfig())
    assert policy.probability(point) == pytest.approx(p) and policy.num_forks(point) == forks
    # Without a penalty it is the plain rule.
    plain = AepoBranching(BranchConfig(consecutive_penalty=0.0))
    assert plain.num_forks(point) == 1
    assert policy.probability(replace(point, probe_entropies=[9.0] * 4)) is None


@pytest.mark.parametrize(
    ("root", "after", "num_roots"),
    [
        (1.0, 1.0, 7),  # equal entropies: int(12 / 2) + 1
        (2.0, 1.0, 8),
        (0.0, 3.0, 3),
        (0.0, 30.0, 2),  # N = 1, and one root more that can fork
        (30.0, 0.0, 12),
    ],
)
def test_a_monitored_root_decides_the_number_of_roots(root, after, num_roots):
    # tau is below any P: whoever has slots forks at every answer, the rest is topped up.
    generator = FakeGenerator(TALK, entropy=entropy_levels(root, after))
    tree = _grow(generator, alpha=0.0, beta=1.0, tau=-99.0)
    assert len(tree.trajectories) == 12
    assert _roots(tree) - tree.num_extra_roots == num_roots
    assert tree.num_forks + tree.num_extra_roots == 12 - num_roots
    assert tree.num_extra_roots == (3 if num_roots == 2 else 0), "10 slots of one root are too many"
    assert all(one.path[0] > 0 for one in tree.trajectories if one.parent_id is not None)
    assert tree.trajectories[0].path == (0,) and tree.trajectories[0].decisions == []


def test_no_root_starts_before_the_monitored_root_has_ended():
    generator = FakeGenerator(TALK, entropy=entropy_levels(1.0, 1.0), delays=3)
    tree = _grow(generator)
    paths = [request.request_id.split("/")[2] for request in generator.requests]
    assert paths[:4] == ["0"] * 4 and "0" not in paths[4:]
    assert len(tree.trajectories) == 12


@pytest.mark.parametrize("write", [turns(END), turns("x" * 999)])
def test_without_tool_steps_the_configuration_decides(write):
    tree = _grow(FakeGenerator(write))
    # 1 monitored, 5 more: half of 12; the six slots become extra roots.
    assert _roots(tree) == 12 and tree.num_extra_roots == 6


def test_a_monitored_root_that_fails_does_not_decide_the_number_of_roots():
    def breaks(request):
        return request.request_id.startswith("p0/0/0/2.")

    entropy = entropy_levels(30.0, 0.0)
    assert _grow(FakeGenerator(TALK, entropy=entropy)).num_extra_roots == 0
    tree = _grow(FakeGenerator(TALK, entropy=entropy, breaks=breaks))
    assert tree.trajectories[0].failed and len(tree.trajectories) == 12
    assert tree.num_extra_roots == 6


def test_a_given_number_of_roots_is_not_monitored():
    generator = FakeGenerator(TALK, entropy=entropy_levels(30.0, 0.0))
    tree = _grow(generator, initial_rollouts=4, alpha=1.0, beta=0.0, consecutive_penalty=0.0)
    assert _roots(tree) == 4 and tree.num_forks == 8
    assert not AepoBranching(BranchConfig(initial_rollouts=4)).needs_monitor_root(12)
    assert not AepoBranching(BranchConfig()).needs_monitor_root(1)


def test_consecutive_forks_count_along_the_path_and_are_inherited():
    # P is .6 * (1 - .25 l): forks at l = 0 only; then the row is broken and it forks again.
    tree = _grow(
        FakeGenerator(TALK, entropy=entropy_levels(1.0, 1.0)),
        initial_rollouts=1,
        alpha=0.6,
        beta=0.0,
        consecutive_penalty=0.25,
    )
    made = {
        one.path: [decision.num_forks for decision in one.decisions] for one in tree.trajectories
    }
    assert made[(0,)] == [1, 0, 1]
    # Its fork at the first answer asks at the second and third: inherited l = 1, then 0.
    assert made[(0, 0)] == [0, 1]
    assert [round(d.probability, 6) for d in tree.trajectories[0].decisions] == [0.6, 0.45, 0.6]
    assert {d.threshold for one in tree.trajectories for d in one.decisions} == {0.5}


def _turn_entropies(*levels):
    """An engine's entropies that depend on the turn, counted by the tool's answers."""
    return lambda response, request: levels[response.count("</result>")]


def _starts(tree):
    """The turn that each path starts with, and its own path, for the forks."""
    return [
        (one.path, sum(turn.role is Role.assistant for turn in one.turns if turn.stop <= size))
        for one in tree.trajectories
        if (size := one.fork_len)
    ]


AT2PO = {"branching": Branching.at2po, "initial_rollouts": 1, "num_trajectories": 5}


def test_the_turn_of_highest_entropy_is_sampled_anew_until_others_are_higher():
    # Of four turns the third has most; each sibling costs .4, so that the second is next.
    generator = FakeGenerator(TALK, entropy=_turn_entropies(1.0, 2.0, 2.5, 9.0))
    tree = _grow(generator, **AT2PO, sibling_penalty=0.4, num_expansion_rounds=4)
    # The third turn has 2.5, with one sibling 2.1 and with two 1.7, the second one 2.0. Sampled
    # anew, the second turn leads to a third one without siblings.
    assert _starts(tree) == [((0, 0), 2), ((0, 1), 2), ((0, 2), 1), ((0, 2, 0), 2)]
    assert tree.num_forks == 4 and tree.num_extra_roots == 0
    # Each path's tools saw its own calls and no others.
    assert all(one.tool_rewards == {"python": 3.0} for one in tree.trajectories)


def test_a_round_takes_the_highest_turns_and_repeats_them_if_there_are_too_few():
    generator = FakeGenerator(TALK, entropy=_turn_entropies(1.0, 3.0, 2.0, 9.0))
    tree = _grow(generator, **AT2PO, num_expansion_rounds=1)
    # The first turn becomes a fresh root; the last one is never sampled anew.
    assert _starts(tree) == [((0, 0), 1), ((0, 1), 2), ((0, 2), 1)]
    assert [one.path for one in tree.trajectories] == [(0,), (0, 0), (0, 1), (0, 2), (1,)]
    assert (tree.num_forks, tree.num_extra_roots) == (3, 1)


def test_without_copies_of_the_tools_fresh_roots_take_the_slots():
    tools = FakeTools(fork_fails=True)
    tree = _grow(FakeGenerator(TALK), tools=tools, **AT2PO)
    assert tree.num_forks == 0 and tree.num_extra_roots == 4
    assert not any(one.failed for one in tree.trajectories)
    assert all(session.released == 1 for session in tools.sessions)


def test_tokens_of_highest_entropy_are_sampled_anew_within_their_turn():
    # The capital letters have the highest entropies of the only root.
    def entropy(response, request):
        return {"D": 5.0, "S": 9.0}.get(response[-1], 2.0) - response.count("</result>")

    tools = FakeTools()
    write = turns("think harD" + CALL, "more wordS" + END)
    tree = _grow(
        FakeGenerator(write, entropy=entropy),
        branching=Branching.appo,
        initial_rollouts=1,
        num_trajectories=3,
        tools=tools,
    )
    root, later, earlier = tree.trajectories
    text = root.response_text
    assert [one.path for one in (later, earlier)] == [(0, 0), (0, 1)]
    assert text[: later.fork_len].endswith("more word")
    assert text[: earlier.fork_len].endswith("think har")
    # The turn goes on where it was left, and the tools see each call once.
    assert {one.response_text for one in tree.trajectories} == {text}
    assert [turn.text for turn in later.turns] == [turn.text for turn in root.turns]
    assert all(one.tool_rewards == {"python": 1.0} for one in tree.trajectories)
    assert all(session.released == 1 for session in tools.sessions)


def test_tokens_of_average_entropy_are_not_sampled_anew():
    generator = FakeGenerator(TALK, entropy=lambda response, request: 1.0)
    tree = _grow(generator, branching=Branching.appo, initial_rollouts=1, num_trajectories=3)
    assert tree.num_forks == 0 and tree.num_extra_roots == 2
