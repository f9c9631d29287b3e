"""The block `rollout.agent`: its settings, and the branching rules that an agent can follow."""

from __future__ import annotations

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.agents import command
from mega_agentrl.rollout.agents.load import check_agent_branching, load_agent
from mega_agentrl.rollout.agents.policy_errors import PolicyErrors

FUNCTION = {"_target_": f"{__name__}:run"}
COMMAND = {
    "_target_": "mega_agentrl.rollout.agents.command.CommandAgent",
    "command": ["node", "agent.js"],
}
OWN_RULE = """
from mega_agentrl.rollout.branching.policy import ArpoBranching

class FromTheEnd(ArpoBranching):
    num_expansion_rounds = 2
"""


async def run(prompt):
    return None


@pytest.mark.parametrize("branching", ["appo", "at2po", "own"])
def test_rules_that_fork_ended_trajectories_never_fork_an_agent(branching, tmp_path):
    if branching == "own":
        (tmp_path / "rule.py").write_text(OWN_RULE)
        branching = f"{tmp_path}/rule.py:FromTheEnd"
    config = RolloutConfig(branching=branching)
    check_agent_branching(config)  # the native loop can
    config.agent = dict(FUNCTION)
    with pytest.raises(ConfigError) as caught:
        check_agent_branching(config)
    assert (caught.value.key, caught.value.got) == ("rollout.branching", config.branching)


@pytest.mark.parametrize("branching", ["none", "after_result", "aepo"])
def test_rules_that_fork_running_trajectories_fork_an_agent(branching):
    check_agent_branching(RolloutConfig(branching=branching, agent=dict(FUNCTION)))


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"max_concurrent": 0}, "rollout.agent.max_concurrent"),
        ({"max_concurrent": 2.5}, "rollout.agent.max_concurrent"),
        ({"policy_errors": "json.JSONDecodeError"}, "rollout.agent.policy_errors"),
        ({"policy_errors": ["no class"]}, "rollout.agent.policy_errors"),
        ({"timeout_s": "5"}, "rollout.agent.timeout_s"),
    ],
    ids=["none at once", "fraction", "no list", "no name", "text"],
)
def test_settings_out_of_range_are_refused(block, key):
    with pytest.raises(ConfigError) as caught:
        load_agent({**FUNCTION, **block})
    assert caught.value.key == key


def test_settings_reach_the_run_and_not_the_function():
    loaded = load_agent({**FUNCTION, "max_concurrent": 5, "policy_errors": ["KeyError"]})
    assert loaded.max_concurrent == 5
    assert loaded.policy_errors.contains(KeyError("x"))
    assert not PolicyErrors().contains(KeyError("x"))


@pytest.mark.parametrize("is_root", [True, False], ids=["root", "another user"])
def test_commands_at_once_are_bounded_by_cores_and_user_ids(monkeypatch, is_root):
    monkeypatch.setattr(command, "needs_dedicated_uid", lambda: is_root)
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda _: range(2))
    assert load_agent(COMMAND).max_concurrent == 32
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda _: range(128))
    assert load_agent(COMMAND).max_concurrent == 400
    many = {**COMMAND, "max_concurrent": 1000}
    assert load_agent({**many, "isolation": "none"}).max_concurrent == 1000
    if not is_root:
        assert load_agent(many).max_concurrent == 1000
        return
    with pytest.raises(ConfigError) as caught:
        load_agent(many)
    assert caught.value.key == "rollout.agent.max_concurrent"
