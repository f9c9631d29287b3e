"""The adapter of Gymnasium over the real package; `tests/packages` has the other ones."""

from __future__ import annotations

from mega_agentrl.rollout.agents.environments.gymnasium import GymnasiumAgent
from mega_agentrl.types.records import StopReason
from tests.chat_models import Script
from tests.rollout.agents.agent_run import grow

TO_THE_GOAL = ["down 1", "1", "2", "1", "2", "2"]


async def test_frozen_lake_is_solved_and_is_cut(codec):
    make = {"render_mode": "ansi", "is_slippery": False, "max_episode_steps": 6}
    agent = GymnasiumAgent(id="FrozenLake-v1", make=make)
    for moves, reward in ((TO_THE_GOAL, 1.0), (["0"] * 6, 0.0)):
        tree = await grow(codec, agent, policy=Script(codec, moves), group_size=1)
        (trajectory,) = tree.trajectories
        assert trajectory.stop_reason is StopReason.eos
        assert trajectory.tool_rewards == {"agent": reward}
