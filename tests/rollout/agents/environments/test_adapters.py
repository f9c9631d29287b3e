"""Environments of others as agents: rewards, seeds, limits, and faults, which train nothing."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import pytest
import torch

from mega_agentrl.algo.advantage import grpo
from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.enums import Branching
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.rollout import BranchConfig
from mega_agentrl.rollout.agents.environments import episode
from mega_agentrl.rollout.agents.environments.gymnasium import GymnasiumAgent
from mega_agentrl.rollout.agents.environments.openenv import (
    OpenEnvAgent,
    describe_observation,
    session_url,
)
from mega_agentrl.rollout.agents.environments.verifiers import VerifiersAgent
from mega_agentrl.tool.deadline import DeadlineExceededError
from mega_agentrl.types.records import Score, StopReason
from tests.chat_models import Script
from tests.rollout.agents.agent_run import grow
from tests.rollout.agents.environments.fake_packages import (
    Games,
    install_verifiers,
    register_gymnasium,
    serve_openenv,
)
from tests.rollout.gateway.chat_policy import ChatPolicy

STEP_TIMEOUT_S = 60.0
ADAPTERS = {
    "gymnasium": (
        register_gymnasium,
        GymnasiumAgent,
        {"id": "Numbers-v0", "step_timeout_s": STEP_TIMEOUT_S},
    ),
    "openenv": (None, OpenEnvAgent, {"step_timeout_s": STEP_TIMEOUT_S}),
    "verifiers": (
        install_verifiers,
        VerifiersAgent,
        {"environment": {"taskset": {"id": "numbers"}}},
    ),
}


@pytest.fixture
async def openenv():
    """An OpenEnv server and its address."""
    async with serve_openenv() as served:
        yield served


@pytest.fixture
async def make_agent(monkeypatch, openenv):
    """Makes an agent; game numbers count from its first attempt."""
    server, url = openenv

    def make(name, faults=None, **changes):
        games = Games()
        install, agent_class, options = ADAPTERS[name]
        if install is None:
            server.games, options = games, {"base_url": url} | options
        else:
            install(games, monkeypatch)
        agent = agent_class(**(options | changes))
        games.made.clear()
        games.faults.update(faults or {})
        return agent, games

    return make


def expire_hanging_calls(monkeypatch, games):
    """Let the time limit of a call pass when all games have ended but those that hang."""

    async def run_with_deadline(work, timeout_s):
        assert timeout_s == STEP_TIMEOUT_S
        task = asyncio.ensure_future(work)
        while not (await asyncio.wait({task}, timeout=0.01))[0]:
            if games.only_hanging_left:
                task.cancel()
                raise DeadlineExceededError(f"not done within {timeout_s} s")
        return task.result()

    monkeypatch.setattr(episode, "run_with_deadline", run_with_deadline)


async def play(codec, agent, *, row=None, **options):
    policy = options.pop("policy", None) or ChatPolicy(codec, call_rate=0)
    return await grow(codec, agent, policy=policy, row={"index": 1} | (row or {}), **options)


def reward_of(trajectory):
    rewards = trajectory.tool_rewards
    return rewards["agent"] if "agent" in rewards else rewards["agent.play"]


@pytest.mark.parametrize("name", ADAPTERS)
async def test_reward_is_the_sum_over_the_steps(codec, make_agent, name):
    agent, games = make_agent(name)
    script = Script(codec, ["I take 10", "Now 25", "7 no, 30"])
    (trajectory,) = (await play(codec, agent, policy=script, group_size=1)).trajectories
    assert trajectory.stop_reason is StopReason.eos
    assert games.made[0].numbers == [10, 25, 30]
    assert reward_of(trajectory) == pytest.approx(0.65)
    if name == "verifiers":
        total = {"agent.bonus": 1.0, "agent.reward": pytest.approx(1.65)}
        assert trajectory.tool_rewards.items() >= total.items()


FAULTS = [
    *(("gymnasium", fault) for fault in ("reset", "step", "hang", "nan", "exit", "end of data")),
    *(("openenv", fault) for fault in ("refused", "reset", "step", "hang", "lost", "nan", "exit")),
    *(("openenv", fault) for fault in ("full", "dropped", "garbled", "invalid observation")),
    *(
        ("verifiers", fault)
        for fault in ("reset", "step", "nan", "exit", "scoring", "unscored", "timeout")
    ),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[" ".join(item) for item in FAULTS])
async def test_fault_reaches_neither_the_loss_nor_a_baseline(
    codec, make_agent, monkeypatch, name, fault
):
    agent, games = make_agent(name, {1: fault})
    if fault == "hang":
        expire_hanging_calls(monkeypatch, games)
    tree = await play(codec, agent, group_size=4)
    (failed,) = [item for item in tree.trajectories if item.failed]
    assert failed.stop_reason is StopReason.agent_failure
    assert "EnvironmentFailedError" in failed.failure_reason
    assert failed.tool_rewards == {}

    batch = pack_trees([_scored(tree)])
    row = tree.trajectories.index(failed)
    is_other = torch.arange(4) != row
    assert not batch.mask_BT[row].any()
    assert batch.mask_BT[is_other].any(1).all()
    others = batch.reward_B[is_other]
    assert others.unique().numel() > 1
    advantages = grpo(batch.reward_B, batch.group_B)
    expected = grpo(others, torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(advantages[is_other], expected)


def _scored(tree):
    """The tree as the rubric leaves it: a failed trajectory has no score."""

    def score(trajectory):
        if trajectory.failed:
            return trajectory
        value = reward_of(trajectory)
        return replace(
            trajectory, score=Score(value=value, correct=False, f1=0.0, answer="", reason="")
        )

    return replace(tree, trajectories=[score(item) for item in tree.trajectories])


@pytest.mark.parametrize("name", ADAPTERS)
async def test_limit_of_the_policy_ends_the_attempt_with_the_reward_so_far(codec, make_agent, name):
    agent, games = make_agent(name)
    tree = await play(codec, agent, max_turns=2)
    for trajectory in tree.trajectories:
        assert trajectory.stop_reason is StopReason.turn_limit
        assert not trajectory.failed
    totals = [sum(game.numbers) / 100 for game in games.made]
    assert sorted(map(reward_of, tree.trajectories)) == pytest.approx(sorted(totals))
    assert all(len(game.numbers) == 2 for game in games.made)


async def test_environment_that_fails_after_a_limit_is_a_failed_attempt(codec, make_agent):
    agent, _ = make_agent("verifiers", {0: "scoring"})
    (trajectory,) = (await play(codec, agent, max_turns=2, group_size=1)).trajectories
    assert trajectory.stop_reason is StopReason.agent_failure


async def test_row_without_a_task_is_a_failed_attempt(codec, make_agent):
    agent, _ = make_agent("verifiers")
    for index in (3, -1, "1"):
        (trajectory,) = (await play(codec, agent, row={"index": index}, group_size=1)).trajectories
        assert trajectory.stop_reason is StopReason.agent_failure


async def test_truncation_and_a_failing_close_are_ordinary_ends(codec, make_agent):
    agent, games = make_agent("gymnasium", {0: "truncated", 1: "close"})
    tree = await play(codec, agent)
    assert [item.stop_reason for item in tree.trajectories] == [StopReason.eos] * 2
    assert all(len(game.numbers) == 3 and game.is_closed for game in games.made)


async def test_message_without_an_action_costs_a_turn_and_no_step(codec, make_agent):
    agent, games = make_agent("gymnasium")
    script = Script(codec, ["Which?", "101", "3", "4", "5"])
    (trajectory,) = (await play(codec, agent, policy=script, group_size=1)).trajectories
    assert games.made[0].numbers == [3, 4, 5]
    assert trajectory.response_text.count("an integer from 0 to 100") == 2


@pytest.mark.parametrize("name", ["gymnasium", "openenv"])
async def test_attempts_at_a_row_start_from_the_same_state(codec, make_agent, name):
    agent, games = make_agent(name)
    for row in ({}, {"level": 2}, {"seed": 7}):
        await play(codec, agent, row=row)
    seeds = [game.seed for game in games.made]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert seeds[4:] == [7, 7]


async def test_fork_finds_the_environment_of_its_parent(codec, make_agent):
    agent, games = make_agent("gymnasium")
    branching = {
        "branching": Branching.after_result,
        "group_size": 6,
        "branch": BranchConfig(
            num_probe_tokens=6, initial_rollouts=2, alpha=4.0, beta=5.0, after_user_messages=True
        ),
    }
    tree = await play(codec, agent, **branching)
    assert tree.num_forks > 0
    assert tree.num_abandoned_forks == 0
    assert all(len(game.numbers) == 3 for game in games.made)
    totals = [sum(game.numbers) / 100 for game in games.made]
    assert sorted(map(reward_of, tree.trajectories)) == pytest.approx(sorted(totals))


@pytest.mark.parametrize("name", ["gymnasium", "verifiers"])
def test_missing_package_is_an_error_with_the_install_command(monkeypatch, name):
    _, agent_class, options = ADAPTERS[name]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as caught:
        agent_class(**options)
    assert caught.value.key == "rollout.agent._target_"
    assert "pip install" in caught.value.expected


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("gymnasium", {"make": ["ansi"]}, "make"),
        ("gymnasium", {"step_timeout_s": 0}, "step_timeout_s"),
        ("gymnasium", {"parse": "no_such_file.py:parse"}, "parse"),
        ("openenv", {"base_url": "localhost"}, "base_url"),
        ("openenv", {"base_url": "ftp://localhost"}, "base_url"),
        ("openenv", {"base_url": None}, "base_url"),
        ("verifiers", {"environment": "gsm8k"}, "environment"),
    ],
    ids=["make", "timeout", "parse", "url", "scheme", "no url", "block"],
)
async def test_bad_options_are_refused(make_agent, name, options, key):
    make_agent(name)
    with pytest.raises(ConfigError) as caught:
        make_agent(name, **options)
    assert caught.value.key == f"rollout.agent.{key}"


async def test_openenv_server_that_refuses_a_value_tells_the_policy(codec, make_agent):
    agent, games = make_agent("openenv")
    script = Script(codec, ["Which?", "3", "4", "5"])
    (trajectory,) = (await play(codec, agent, policy=script, group_size=1)).trajectories
    assert games.made[0].numbers == [3, 4, 5]
    assert "Invalid action: message: No digit" in trajectory.response_text


async def test_openenv_action_with_a_wrong_field_is_the_configurations_fault(codec, make_agent):
    agent, _ = make_agent("openenv", action_field="text")
    (trajectory,) = (await play(codec, agent, group_size=1)).trajectories
    assert trajectory.stop_reason is StopReason.agent_failure
    assert "rollout.agent.action_field=text" in trajectory.failure_reason


async def test_full_openenv_server_names_both_limits(codec, make_agent):
    agent, _ = make_agent("openenv", {0: "full"})
    (trajectory,) = (await play(codec, agent, group_size=1)).trajectories
    assert "max_concurrent_envs" in trajectory.failure_reason
    assert "rollout.agent.max_concurrent" in trajectory.failure_reason


async def test_pings_of_an_openenv_server_are_answered_while_the_policy_writes(
    codec, make_agent, openenv
):
    class Slow(Script):
        async def generate(self, request):
            await server.is_alive.wait()
            return await super().generate(request)

    server, _ = openenv
    agent, _ = make_agent("openenv", {0: "pings"})
    policy = Slow(codec, ["1", "2", "3"])
    (trajectory,) = (await play(codec, agent, policy=policy, group_size=1)).trajectories
    assert trajectory.tool_rewards == {"agent": pytest.approx(0.06)}


@pytest.mark.parametrize(
    ("base_url", "address"),
    [
        ("http://localhost:8000", "ws://localhost:8000/ws"),
        ("https://host/envs/maze/", "wss://host/envs/maze/ws"),
        ("ws://host:1/ws", "ws://host:1/ws"),
    ],
    ids=["http", "https with a path", "the address of sessions"],
)
def test_sessions_of_an_openenv_server_are_below_its_address(base_url, address):
    assert session_url(base_url) == address


def test_observation_of_several_fields_is_shown_as_json():
    observation = {"board": [1, 2], "hint": "é", "reward": 0.5, "done": False, "metadata": {}}
    assert describe_observation(observation) == '{"board": [1, 2], "hint": "é"}'
    assert describe_observation({"text": "Hello", "reward": None}) == "Hello"
