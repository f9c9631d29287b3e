"""Agents that are commands: what they get, what ends them, and that they reach only the gateway."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.agent import AGENT_OUTPUT_LOGGER
from mega_agentrl.rollout.agents.command import CommandAgent
from mega_agentrl.types.records import StopReason
from tests.rollout.agents.agent_run import grow
from tests.rollout.gateway.chat_policy import ChatPolicy

ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({"model": "m", "messages": task["prompt"]}).encode()
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    body,
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request))
print("noise")
print(json.dumps({"length": len(answer["choices"][0]["message"]["content"] or "")}))
"""


def agent_of(program, **options):
    return CommandAgent(command=[sys.executable, "-c", program], **options)


async def run_agent(codec, agent, **options):
    tree = await grow(codec, agent, policy=ChatPolicy(codec, call_rate=0), group_size=1, **options)
    return tree.trajectories[0]


async def test_command_reaches_the_gateway_and_returns_parts(codec):
    trajectory = await run_agent(codec, agent_of(ASK, reads_reward=True))
    assert trajectory.stop_reason is StopReason.eos
    assert sum(trajectory.loss_mask) > 0
    content = trajectory.response_text.rpartition("</think>")[2]
    assert trajectory.tool_rewards == {"agent.length": float(len(content))}


async def test_command_reads_the_row_from_its_standard_input(codec):
    program = f"{ASK}\nprint(json.dumps({{'level': task['extra_info']['level']}}))"
    checks = """
assert task["data_source"] == "games" and task["ground_truth"] == ["a", "b"], task
assert task["environment_kwargs"] == {} and task["tools_kwargs"] == {}, task
assert (task["attempt"], type(task["seed"])) == (0, int) and "/" in task["attempt_id"], task
"""
    row = {"data_source": "games", "ground_truth": ("a", "b"), "extra_info": {"level": 3}}
    agent = agent_of(program + checks, reads_reward=True)
    trajectory = await run_agent(codec, agent, prompt=row)
    assert trajectory.tool_rewards == {"agent.level": 3.0}


async def test_output_of_a_command_is_logged_when_it_succeeds(codec, caplog):
    caplog.set_level(logging.INFO, logger=AGENT_OUTPUT_LOGGER)
    program = f"{ASK}\nprint('y' * 100_000 + 'step 3')\nprint('careful', file=sys.stderr)"
    trajectory = await run_agent(codec, agent_of(program))
    assert trajectory.stop_reason is StopReason.eos
    stdout, stderr = (
        record.getMessage() for record in caplog.records if record.name == AGENT_OUTPUT_LOGGER
    )
    assert stdout.startswith(trajectory.trajectory_id)
    assert stdout.endswith("ystep 3")
    assert len(stdout) < 10_000
    assert stderr.endswith("careful")


async def test_reward_line_may_come_in_pieces(codec):
    for_each = "for text in ('0.1', '2', '5'): print(text, end='', flush=True); time.sleep(0.05)"
    program = f"{ASK}\nimport time\n{for_each}"
    trajectory = await run_agent(codec, agent_of(program, reads_reward=True))
    assert trajectory.tool_rewards == {"agent": 0.125}


@pytest.mark.parametrize(
    ("program", "stop_reason", "reason"),
    [
        ("import sys; sys.exit(3)", StopReason.agent_failure, "exit code 3"),
        ("raise OSError('no key')", StopReason.agent_failure, "no key"),
        ("import os; os.kill(os.getpid(), 9)", StopReason.agent_failure, "exit code 137"),
        ("print('nonsense')", StopReason.agent_failure, "nonsense"),
        pytest.param(
            "while True: print('x' * 100_000)",
            StopReason.trajectory_timeout,
            "its time is over",
            marks=pytest.mark.extended,
        ),
        ("import time; time.sleep(1000)", StopReason.trajectory_timeout, "its time is over"),
    ],
    ids=["exit code", "exception", "killed", "nonsense", "flood", "hangs"],
)
async def test_failed_command_is_a_failed_attempt(codec, program, stop_reason, reason):
    limit = {"timeout_s": 1.0} if stop_reason is StopReason.trajectory_timeout else {}
    agent = agent_of(program, reads_reward=True)
    trajectory = await run_agent(codec, agent, **limit)
    assert trajectory.stop_reason is stop_reason
    assert reason in trajectory.failure_reason


EAT = """
import mmap, os, sys
if os.fork() == 0:
    shared = mmap.mmap(-1, 400 << 20)
    for _ in range(400):
        shared.write(bytes(1 << 20))
os.wait()
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("program", "options", "stop_reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", {}, StopReason.policy_error),
        ("import os; os.kill(os.getpid(), 15)", {}, StopReason.policy_error),
        ("import os; os.kill(os.getpid(), 11)", {}, StopReason.agent_crash),
        ("import os; os._exit(1)", {}, StopReason.agent_crash),
        ("raise OSError('disk full')", {}, StopReason.agent_crash),
        ("print('no reward')", {"reads_reward": True}, StopReason.agent_crash),
        ("print('NaN')", {"reads_reward": True}, StopReason.agent_crash),
        ("import os; os._exit(1)", {"isolation": "none"}, StopReason.agent_failure),
        (
            "print('no reward')",
            {"isolation": "none", "reads_reward": True},
            StopReason.agent_failure,
        ),
        ("import os; os.kill(os.getpid(), 9)", {"isolation": "none"}, StopReason.agent_failure),
        (EAT, {"memory_limit_mib": 128}, StopReason.policy_error),
    ],
    ids=[
        *("killed", "terminated", "crashed", "exits", "raises", "prints no reward", "prints NaN"),
        *("exits without a sandbox", "prints no reward without a sandbox"),
        *("killed without a sandbox", "memory"),
    ],
)
async def test_in_its_sandbox_no_end_of_an_agent_after_an_answer_is_masked(
    codec, program, options, stop_reason
):
    """There only what the policy has caused can kill it, and that with any exit code."""
    trajectory = await run_agent(codec, agent_of(f"{ASK}\n{program}", **options))
    assert trajectory.stop_reason is stop_reason
    assert trajectory.failed == (options.get("isolation") == "none")
    if not trajectory.failed:
        assert trajectory.tool_rewards == {} and sum(trajectory.loss_mask) > 0
        assert trajectory.turns[-1].outcome.answer


async def test_command_has_no_network_but_the_gateway(codec):
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 60)"
    async with server:
        trajectory = await run_agent(codec, agent_of(connect))
        assert "ConnectionRefusedError" in trajectory.failure_reason
        trusted = await run_agent(codec, agent_of(connect, isolation="none"))
        assert "without an answer of the policy" in trusted.failure_reason  # it could connect


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"command": "python agent.py"}, "rollout.agent.command"),
        ({"command": []}, "rollout.agent.command"),
        ({"command": ["x"], "network": "all"}, "rollout.agent.network"),
        ({"command": ["x"], "read_only": ["/no/such/folder"]}, "rollout.agent.read_only"),
    ],
    ids=["text", "empty", "network", "folder"],
)
def test_bad_options_are_refused(options, key):
    with pytest.raises(ConfigError) as caught:
        CommandAgent(**options)
    assert caught.value.key == key
