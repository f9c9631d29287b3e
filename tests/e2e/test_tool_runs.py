"""Runs whose policy calls an MCP server or a workspace, or plays an environment, and is trained."""

import json

import pandas as pd
import pytest

from tests.e2e.conftest import finish_training, start
from tests.e2e.overrides import make_task, task_overrides
from tests.train.metric_lines import check_mismatch

SIZES = ("--num-train=60", "--num-dev=20", "--num-validation=20", "--num-demonstrations=2000")
NATIVE = (
    "rollout.agent._target_=''",
    "rollout.branching=after_result",
    "rollout.branch.alpha=5",  # forks wherever it is asked
)
GYMNASIUM = "mega_agentrl.rollout.agents.environments.gymnasium.GymnasiumAgent"
MOVES = """
import re


def parse(text):
    digits = re.findall("[0-9]", text)
    if not digits:
        raise ValueError("expected a digit")
    return int(digits[-1]) % 4
"""
SEARCH_SERVER = """
import json

from mcp.server import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("facts")
facts = {}
for line in open("corpus.jsonl"):
    document = json.loads(line)
    facts[document["title"]] = document["text"]


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def search(query: str) -> str:
    return facts.get(query, "No results.")


server.run()
"""


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "toolqa_chat"
    make_task("toolqa_chat", folder, *SIZES)
    return folder


def train(data, run_dir, *overrides):
    """Train for two steps; the lines of metrics."""
    child = start(
        "experiment=smoke_openai",
        "sft.max_steps=400",
        "total_steps=2",
        "data.prompts_per_step=4",
        "evaluate.num_questions=10",
        "tool.search.source=''",
        *task_overrides(data, run_dir),
        *overrides,
    )
    lines = finish_training(child, run_dir, 2)
    check_mismatch(lines, 1e-5)
    return lines


@pytest.mark.slow(120)
def test_an_mcp_server_answers_and_its_sessions_fork(data, tmp_path):
    (data / "server.py").write_text(SEARCH_SERVER)
    server = {"command": "python", "args": ["server.py"], "cwd": "."}
    (data / "mcp.json").write_text(json.dumps({"mcpServers": {"facts": server}}))
    lines = train(data, tmp_path / "run", *NATIVE, f"tool.mcp={data}/mcp.json")
    for line in lines:
        assert line["rollout/tool/search/num_calls"] > 0
        assert line["rollout/tool/search/num_ok"] > 0
        assert line["rollout/forks_per_prompt"] > 0


@pytest.mark.slow(120)
def test_a_workspace_answers_and_forks(data, tmp_path):
    _move_facts_into_files(data)
    lines = train(
        data,
        tmp_path / "run",
        *NATIVE,
        "tool.workspace.root=host",
        f"tool.workspace.folder={data}/facts",
        "engine.max_model_len=192",
        "rollout.max_response_tokens=150",
    )
    for line in lines:
        assert line["rollout/tool/bash/num_ok"] > 0
        assert line["rollout/forks_per_prompt"] > 0


def _move_facts_into_files(data):
    """Change the task: a fact is a file in the workspace, and `bash` reads and calculates."""
    (data / "facts").mkdir()
    for line in (data / "corpus.jsonl").read_text().splitlines():
        document = json.loads(line)
        (data / "facts" / document["title"]).write_text(document["text"])
    rows = pd.read_parquet(data / "demonstrations.parquet")
    rows["messages"] = [[_with_bash(message) for message in row] for row in rows["messages"]]
    rows["tools"] = json.dumps([{"type": "function", "function": {"name": "bash"}}])
    rows.to_parquet(data / "demonstrations.parquet")
    for name in ("train", "validation", "dev"):
        rows = pd.read_parquet(data / f"{name}.parquet")
        rows["extra_info"] = [
            info | {"tools_kwargs": {"bash": {"create_kwargs": {"setup_command": "true"}}}}
            for info in rows["extra_info"]
        ]
        rows.to_parquet(data / f"{name}.parquet")


def _with_bash(message):
    text = message["content"]
    if "<tool_call>" not in text:
        return message
    before, _, rest = text.partition("<tool_call>\n")
    call = json.loads(rest.removesuffix("\n</tool_call>"))
    if call["name"] == "search":
        command = f"cat '{call['arguments']['query']}'"
    else:
        command = f"echo $(({call['arguments']['code']}))"
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return message | {"content": f"{before}<tool_call>\n{call}\n</tool_call>"}


@pytest.mark.slow(120)
def test_an_environment_of_gymnasium_is_played(data, tmp_path):
    row = {
        "data_source": "lake",
        "prompt": "What is 1+1?",
        "reward_model": {"ground_truth": ""},
    }
    for name in ("train", "validation", "dev"):
        pd.DataFrame([row] * 20).to_parquet(data / f"{name}.parquet")
    (data / "moves.py").write_text(MOVES)
    lines = train(
        data,
        tmp_path / "run",
        f"rollout.agent._target_={GYMNASIUM}",
        "+rollout.agent.id=FrozenLake-v1",
        f"+rollout.agent.parse={data}/moves.py:parse",
        "+rollout.agent.make={desc:[SG],is_slippery:false}",
        "+reward.rubric.default={agent:1}",
    )
    for line in lines:
        assert 0 <= line["rollout/reward_mean"] <= 1
        assert line["rollout/num_turns_mean"] > 1
