"""A branching rule of one's own: registered, and a tree that is sampled with it.

For a run `rollout.branching` must accept its name, too: one line in `config.enums.Branching`.
"""

from __future__ import annotations

import asyncio

import pytest

from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.rollout.branching import policy
from mega_agentrl.rollout.tree import sample_tree
from tests.fakes import EOS, FakeGenerator, make_context, make_prompt, turns
from tests.rollout.virtual_time import run_virtually

CALL = "<search>q1</search>"
TALK = turns("thinkhard" + CALL, "more words" + CALL, "and so on" + CALL, f"at last it ends{EOS}")
CONFIG = RolloutConfig(
    group_size=4,
    branching="peak",
    branch=BranchConfig(initial_rollouts=1, num_probe_tokens=8, tau=2.5),
    max_tool_calls=9,
    max_turns=20,
    max_response_tokens=400,
)


@pytest.fixture(autouse=True)
def peak_branching(monkeypatch):
    """Register the rule for one test: fork where one probed token is tau nats above the root."""
    monkeypatch.setattr(policy, "_POLICY_TYPES", dict(policy._POLICY_TYPES))

    @policy.register_branch_policy("peak")
    class PeakBranching(policy.BranchPolicy):
        def num_forks(self, point):
            rises = max(point.probe_entropies, default=0.0) - point.baseline > self.config.tau
            return point.num_slots if rises else 0

    return PeakBranching


def sample(entropy):
    context = make_context(CONFIG, generator=FakeGenerator(TALK, entropy=entropy))
    return run_virtually(asyncio.wait_for(sample_tree(context, make_prompt(), "p0"), 20))


def test_the_configuration_selects_it(peak_branching):
    chosen = policy.make_branch_policy(CONFIG)
    assert type(chosen) is peak_branching and chosen.config is CONFIG.branch


def test_all_forks_start_at_the_turn_with_the_peak():
    tree = sample(lambda response, request: 4.0 if response.endswith("more") else 1.0)
    assert (tree.num_forks, tree.num_top_ups) == (3, 0)
    begin = "thinkhard" + CALL + "<result>ok:q1</result>"
    root, *forks = tree.trajectories
    assert [one.path for one in forks] == [(0, 0), (0, 1), (0, 2)]
    assert {one.fork_len for one in forks} == {len(begin)}
    assert [(made.position, made.num_forks) for made in root.decisions] == [(len(begin), 3)]


def test_without_a_peak_there_are_only_roots():
    tree = sample(lambda response, request: 1.0)
    assert (tree.num_forks, tree.num_top_ups) == (0, 3)
    decisions = [made.num_forks for one in tree.trajectories for made in one.decisions]
    assert decisions == [0, 0, 0]
