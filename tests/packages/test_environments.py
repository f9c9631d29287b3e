"""Environments of others: real servers and games, played by a scripted policy."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import gymnasium
import pytest

from mega_agentrl.rollout.agents.environments.gymnasium import GymnasiumAgent
from mega_agentrl.rollout.agents.environments.openenv import OpenEnvAgent
from mega_agentrl.types.records import StopReason
from tests.chat_models import Script
from tests.packages.conftest import ROOT
from tests.packages.test_agents import SESSIONS, play
from tests.rollout.agents.agent_run import grow

pytestmark = [pytest.mark.packages, pytest.mark.timeout(1800)]


async def test_gymnasium_game_is_won(codec, record_property):
    record_property("package", "gymnasium")
    record_property("version", gymnasium.__version__)
    record_property("tried", "FrozenLake-v1 with the adapter")
    record_property("beside", "safe")
    make = {"render_mode": "ansi", "is_slippery": False}
    agent = GymnasiumAgent(id="FrozenLake-v1", make=make)
    policy = Script(codec, ["1", "1", "2", "1", "2", "2"])
    (trajectory,) = (await grow(codec, agent, policy=policy, group_size=1)).trajectories
    assert trajectory.tool_rewards == {"agent": 1.0}


async def test_openenv_server_is_played_over_its_protocol(codec, package):
    python = package("openenv-core", tried="a server of its own, two sessions and a wrong field")
    server = Path(__file__).with_name("openenv_server.py")
    child = subprocess.Popen([python, server], stdout=subprocess.PIPE, text=True)
    try:
        url = child.stdout.readline().strip()
        policy = Script(codec, ["12345", "1", "1", "12345"])
        tree = await grow(codec, OpenEnvAgent(base_url=url), policy=policy)
        for trajectory in tree.trajectories:
            assert trajectory.stop_reason is StopReason.eos, trajectory.failure_reason
        total = sum(trajectory.tool_rewards["agent"] for trajectory in tree.trajectories)
        assert total == pytest.approx(1.2)
        agent = OpenEnvAgent(base_url=url, action_field="text")
        tree = await grow(codec, agent, policy=Script(codec, ["1"]), group_size=1)
        assert "rollout.agent.action_field=text" in tree.trajectories[0].failure_reason
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("name", "tried"),
    [
        ("reasoning-gym", "a task of basic_arithmetic, scored by the package"),
        ("textarena", "GuessTheNumber-v0 over three turns"),
    ],
)
async def test_tasks_of_a_package_are_played_by_a_command(codec, package, name, tried):
    python = package(name, tried=tried)
    session = name.replace("-", "_")
    told = subprocess.run(
        [python, SESSIONS / f"{session}_session.py", "--solve", "7"], capture_output=True, text=True
    )
    turns = json.loads(told.stdout.splitlines()[-1])
    trajectory, num_tokens = await play(codec, python, session, turns, seed=7)
    assert trajectory.stop_reason is StopReason.eos, trajectory.failure_reason
    assert trajectory.tool_rewards == {"agent": 1.0}
    assert sum(trajectory.loss_mask) == num_tokens


def test_game_of_verifiers_is_played_beside_the_trainers_packages(package):
    python = package("verifiers", "verifiers[ta]", "uv", tried="Hangman-v0 with the adapter")
    # Not PYTHONPATH, which would reach the game's own process and another Python there.
    site = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    folder = subprocess.run([python, *site], capture_output=True, text=True, check=True).stdout
    trainer = f"{ROOT}\n{sysconfig.get_path('purelib')}\n"
    Path(folder.strip(), "trainer.pth").write_text(trainer, encoding="utf-8")
    done = subprocess.run(
        [python, "-m", "tests.packages.sessions.verifiers_session"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) == 1.0
