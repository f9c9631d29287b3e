"""AEPO's branch policy: the penalty on consecutive forks, and the number of roots."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.schema import RolloutConfig
from mega_agentrl.config.sections.branching import BranchConfig
from mega_agentrl.rollout.branching.aepo import AepoBranching
from mega_agentrl.rollout.branching.policy import ForkPoint, NoBranching
from mega_agentrl.rollout.context import RolloutContext
from mega_agentrl.rollout.tree import sample_tree
from tests.fakes import EOS, CharCodec, FakeGenerator, FakeTools, make_prompt, turns
from tests.rollout.virtual_time import run_virtually

CALL = "<search>q1</search>"
END = f"<answer>1</answer>{EOS}"
TALK = turns("thinkhard" + CALL, "more words" + CALL, "and so on" + CALL, "at last" + END)


def _grow(generator, *, num_trajectories=12, branching=Branching.aepo, **branch):
    config = RolloutConfig(
        group_size=num_trajectories,
        branching=branching,
        branch=BranchConfig(num_probe_tokens=8, **branch),
        max_tool_calls=9,
        max_turns=20,
        max_response_tokens=400,
    )
    context = RolloutContext(
        generator=generator,
        tools=FakeTools(),
        codec=CharCodec(),
        policy=AepoBranching(config.branch) if branching is Branching.aepo else NoBranching(),
        config=config,
        temperature=1.0,
        max_model_len=500,
        seed=1,
        step=0,
    )
    return run_virtually(asyncio.wait_for(sample_tree(context, make_prompt(), "p0"), 20))


def _entropies(root, after):
    """`root` before the first answer, `after` behind it."""
    return lambda response, request: after if "</result>" in response else root


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
    point = ForkPoint(
        path=(0,),
        num_slots=9,
        baseline=1.0,
        probe_entropies=[entropy] * 20,
        num_consecutive_forks=num_consecutive_forks,
    )
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
def test_a_monitored_root_says_how_many_there_are(root, after, num_roots):
    # tau is below any P: whoever has slots forks at every answer, the rest is topped up.
    generator = FakeGenerator(TALK, entropy=_entropies(root, after))
    tree = _grow(generator, alpha=0.0, beta=1.0, tau=-99.0)
    assert len(tree.trajectories) == 12
    assert _roots(tree) - tree.num_top_ups == num_roots
    assert tree.num_forks + tree.num_top_ups == 12 - num_roots
    assert tree.num_top_ups == (3 if num_roots == 2 else 0), "10 slots of one root are too many"
    assert all(one.path[0] > 0 for one in tree.trajectories if one.parent_id is not None)
    assert tree.trajectories[0].path == (0,) and tree.trajectories[0].decisions == []


def test_no_root_starts_before_the_monitored_root_has_ended():
    generator = FakeGenerator(TALK, entropy=_entropies(1.0, 1.0), delays=3)
    tree = _grow(generator)
    paths = [request.request_id.split("/")[2] for request in generator.requests]
    assert paths[:4] == ["0"] * 4 and "0" not in paths[4:]
    assert len(tree.trajectories) == 12


@pytest.mark.parametrize("write", [turns(END), turns("x" * 999)])
def test_without_tool_steps_the_configuration_decides(write):
    tree = _grow(FakeGenerator(write))
    # 1 monitored, 5 more: half of 12; the six slots become top-ups.
    assert _roots(tree) == 12 and tree.num_top_ups == 6


def test_a_monitored_root_that_fails_tells_nothing():
    def breaks(request):
        return request.request_id.startswith("p0/0/0/2.")

    entropy = _entropies(30.0, 0.0)
    assert _grow(FakeGenerator(TALK, entropy=entropy)).num_top_ups == 0
    tree = _grow(FakeGenerator(TALK, entropy=entropy, breaks=breaks))
    assert tree.trajectories[0].failed and len(tree.trajectories) == 12
    assert tree.num_top_ups == 6


def test_a_given_number_of_roots_is_not_monitored():
    generator = FakeGenerator(TALK, entropy=_entropies(30.0, 0.0))
    tree = _grow(generator, initial_rollouts=4, alpha=1.0, beta=0.0, consecutive_penalty=0.0)
    assert _roots(tree) == 4 and tree.num_forks == 8
    policy = AepoBranching(BranchConfig(initial_rollouts=4))
    assert not policy.needs_monitor_root(12) and not AepoBranching(
        BranchConfig()
    ).needs_monitor_root(1)


def test_consecutive_forks_count_along_the_path_and_are_inherited():
    # P is .6 * (1 - .25 l): forks at l = 0 only; then the row is broken and it forks again.
    tree = _grow(
        FakeGenerator(TALK, entropy=_entropies(1.0, 1.0)),
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
