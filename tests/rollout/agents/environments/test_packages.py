"""The adapters over the real packages, where they are installed."""

from __future__ import annotations

import pytest

from mega_agentrl.rollout.agents.environments.gymnasium import GymnasiumAgent
from mega_agentrl.types.records import StopReason
from tests.chat_models import Script
from tests.rollout.agents.test_runner import grow

TO_THE_GOAL = ["down 1", "1", "2", "1", "2", "2"]


async def test_frozen_lake_is_solved_and_is_cut(codec):
    make = {"render_mode": "ansi", "is_slippery": False, "max_episode_steps": 6}
    agent = GymnasiumAgent(id="FrozenLake-v1", make=make)
    for moves, reward in ((TO_THE_GOAL, 1.0), (["0"] * 6, 0.0)):
        tree = await grow(codec, agent, policy=Script(codec, moves), group_size=1)
        (trajectory,) = tree.trajectories
        assert trajectory.stop_reason is StopReason.eos
        assert trajectory.tool_rewards == {"agent": reward}


async def test_session_of_an_openenv_server(codec):
    pytest.importorskip("openenv.core", reason="openenv is not installed")
    from mega_agentrl.rollout.agents.environments.openenv import OpenEnvAgent
    from tests.rollout.agents.environments.echo_server import serve_echo

    with serve_echo() as url:
        agent = OpenEnvAgent(base_url=url)
        tree = await grow(codec, agent, policy=Script(codec, ["12345", "1"]), group_size=1)
    (trajectory,) = tree.trajectories
    assert trajectory.tool_rewards == {"agent": pytest.approx(0.6)}
    assert "echo 12345" in trajectory.response_text
