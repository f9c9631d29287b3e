"""Agents written with frameworks, as commands of their own environments, unmodified.

Each reads the task, calls a tool of its own, or a shell, and answers. The policy is scripted; its
tokens are counted: each is trained once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_agentrl.rollout.agents.command import CommandAgent
from mega_agentrl.types.records import StopReason
from tests.chat_models import Script
from tests.rollout.agents.agent_run import grow
from tests.rollout.chat_run import call

pytestmark = [pytest.mark.packages, pytest.mark.timeout(1800)]

SESSIONS = Path(__file__).parent / "sessions"
SUM = [f"<think>sum</think>{call(a=1, b=2)}", "It is 3."]
SHELL = [
    call("bash", command="echo $((1 + 2)) > sum"),
    call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat sum"),
]
UNDECLARED_OF_QWEN = ("numpy", "soundfile", "tqdm", "python-dateutil")
"""Packages that qwen-agent imports and does not name as requirements."""
AGENTS = {
    "openai-agents": ((), SUM, "Responses API, a function tool"),
    "langgraph": (("langgraph", "langchain-openai"), SUM, "ReAct agent, streamed"),
    "pydantic-ai-slim": (("pydantic-ai-slim[openai]",), SUM, "agent with a tool"),
    "smolagents": (
        ("smolagents[openai]",),
        [SUM[0], call("final_answer", answer="3")],
        "ToolCallingAgent",
    ),
    "qwen-agent": (
        ("qwen-agent", *UNDECLARED_OF_QWEN),
        SUM,
        "FnCallAgent, which writes its calls itself",
    ),
    "mini-swe-agent": ((), SHELL, "a task in a shell"),
}


async def play(codec, python, session, turns, **row):
    """The trajectory of a session that a scripted policy answers, and all its sampled tokens."""
    agent = CommandAgent(
        command=[str(python), str(SESSIONS / f"{session}_session.py")],
        read_only=[str(python.parents[1]), str(SESSIONS)],
        memory_limit_mib=8192,
        reads_reward=True,
    )
    tree = await grow(codec, agent, policy=Script(codec, turns), group_size=1, row=row)
    num_tokens = sum(len(codec.encode(turn)) + 1 for turn in turns)
    return tree.trajectories[0], num_tokens


@pytest.mark.parametrize("name", AGENTS)
async def test_agent_is_trained_on_each_token_that_its_policy_wrote(codec, package, name):
    requirements, turns, tried = AGENTS[name]
    python = package(name, *requirements, tried=tried)
    trajectory, num_tokens = await play(codec, python, name.replace("-", "_"), turns)
    assert trajectory.stop_reason is StopReason.eos, trajectory.failure_reason
    assert trajectory.tool_rewards == {"agent": 1.0}
    assert sum(trajectory.loss_mask) == num_tokens
