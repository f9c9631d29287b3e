"""The agents of the examples and of the guide, against the gateway with a scripted policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.rollout.agents.load import load_agent
from mega_agentrl.types.records import StopReason
from tests.chat_models import Script, save_tokenizer
from tests.rollout.agents.agent_run import grow
from tests.rollout.chat_run import call

ROOT = Path(__file__).resolve().parents[2]
TURNS = [f"<think>sum</think>{call(a=1, b=2)}", "It is 3."]


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return HFCodec(save_tokenizer("qwen25", tmp_path_factory.mktemp("tokenizer")))


async def run_file(codec, file):
    """The trajectory of the agent that a block of `rollout.agent` names, with two turns."""
    host = load_agent({"_target_": f"{file}:run"})
    tree = await grow(codec, host.agent, policy=Script(codec, TURNS), group_size=1)
    return tree.trajectories[0]


async def test_example_uses_the_tools_of_the_run(codec):
    trajectory = await run_file(codec, ROOT / "examples/openai_agent.py")
    assert trajectory.stop_reason is StopReason.eos
    assert [turn.text for turn in trajectory.turns if turn.outcome] == ["3"]
    # The agent offers the tools that the prompt shows, so both have the same tokens.
    assert trajectory.context_resets == ()


async def test_agent_of_the_guide_brings_its_own_tool(codec, tmp_path):
    guide = (ROOT / "docs/own_agent.md").read_text()
    file = tmp_path / "my_agent.py"
    file.write_text(re.search(r"```python my_agent.py\n(.*?)```", guide, re.S)[1])
    trajectory = await run_file(codec, file)
    assert trajectory.stop_reason is StopReason.eos
    assert [turn.text for turn in trajectory.turns if turn.outcome] == ["3"]
    assert len(trajectory.context_resets) == 1  # other tools than the prompt shows


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"timeout_s": 5}, "rollout.agent._target_"),
        ({"_target_": "no_such_file.py:run"}, "rollout.agent._target_"),
        ({"_target_": "json:dumps", "colour": 1}, "rollout.agent._target_"),
        ({"_target_": "json:dumps", "timeout_s": 0}, "rollout.agent.timeout_s"),
        ({"_target_": "json:dumps", "gateway": {"hots": "x"}}, "rollout.agent.gateway.hots"),
        ({"_target_": "json:dumps", "gateway": {"port": "80"}}, "rollout.agent.gateway.port"),
        ({"_target_": "json:dumps", "gateway": {"port": 99_999}}, "rollout.agent.gateway.port"),
    ],
    ids=["no target", "no file", "option", "time", "name", "type", "port"],
)
def test_wrong_block_is_refused(block, key):
    with pytest.raises(ConfigError) as caught:
        load_agent(block)
    assert caught.value.key == key
