"""`examples/my_branching.py` as `rollout.branching`: loaded, and trees that are sampled with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mega_agentrl.config.algorithm_traits import BRANCHING_RULES
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.rollout.branching import policy
from mega_agentrl.rollout.tree import sample_tree
from tests.config.refusals import refused
from tests.fakes import EOS, FakeGenerator, make_context, make_prompt, turns
from tests.rollout.grown_trees import CALL
from tests.rollout.virtual_time import run_virtually

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "my_branching.py")
TALK = turns("thinkhard" + CALL, "more words" + CALL, "and so on" + CALL, f"at last it ends{EOS}")
CONFIG = RolloutConfig(
    group_size=4,
    branching=EXAMPLE,
    branch=BranchConfig(initial_rollouts=1, num_probe_tokens=8, tau=2.5),
    max_tool_calls=9,
    max_turns=20,
    max_response_tokens=400,
)


def sample(entropy):
    context = make_context(CONFIG, generator=FakeGenerator(TALK, entropy=entropy))
    return run_virtually(asyncio.wait_for(sample_tree(context, make_prompt(), "p0"), 20))


def test_rollout_branching_selects_the_example():
    chosen = policy.make_branch_policy(CONFIG)
    assert type(chosen) is policy.load_user_branching(f"{EXAMPLE}:Branching")
    assert chosen.config is CONFIG.branch


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("class Branching:\n    pass\n", "got <class"),
        (
            "from mega_agentrl.rollout.branching.policy import BranchPolicy as Branching\n",
            "num_for",
        ),
        ("x = 1\n", "no Branching"),
    ],
    ids=["class", "abstract", "nothing"],
)
def test_a_wrong_class_is_refused(tmp_path, text, cause):
    file = tmp_path / "own.py"
    file.write_text(text)
    error = refused(policy.load_user_branching, str(file))
    assert (error.key, error.got) == ("rollout.branching", str(file))
    assert cause in error.cause


def test_options_are_the_fields_of_a_dataclass(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "from dataclasses import dataclass\n\n"
        "from mega_agentrl.rollout.branching.policy import BranchPolicy\n\n\n"
        "@dataclass(frozen=True)\nclass Branching(BranchPolicy):\n    height: float = 2.0\n\n"
        "    def num_forks(self, point):\n        return 0\n"
    )
    for options, height in (({}, 2.0), ({"height": 3.0}, 3.0)):
        config = RolloutConfig(branching=str(file), branching_options=options)
        BRANCHING_RULES.check_options(config.branching, config.branching_options)
        assert policy.make_branch_policy(config).height == height


def test_all_forks_start_at_the_turn_with_the_peak():
    tree = sample(lambda response, request: 4.0 if response.endswith("more") else 1.0)
    assert (tree.num_forks, tree.num_extra_roots) == (3, 0)
    begin = "thinkhard" + CALL + "<result>ok:q1</result>"
    root, *forks = tree.trajectories
    assert [one.path for one in forks] == [(0, 0), (0, 1), (0, 2)]
    assert {one.fork_len for one in forks} == {len(begin)}
    assert [(made.position, made.num_forks) for made in root.decisions] == [(len(begin), 3)]


def test_without_a_peak_there_are_only_roots():
    tree = sample(lambda response, request: 1.0)
    assert (tree.num_forks, tree.num_extra_roots) == (0, 3)
    decisions = [made.num_forks for one in tree.trajectories for made in one.decisions]
    assert decisions == [0, 0, 0]
