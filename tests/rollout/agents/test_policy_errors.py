"""Exceptions of an agent that the policy causes end an attempt, which is scored."""

from __future__ import annotations

import json
import sys

import pytest

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.rollout.agents.base import (
    AgentCommandError,
    EnvironmentFailedError,
    PolicyError,
)
from mega_agentrl.rollout.agents.command import CommandAgent
from mega_agentrl.rollout.agents.policy_errors import PolicyErrors
from mega_agentrl.types.records import StopReason
from tests.rollout.agents.agent_run import grow, post
from tests.rollout.gateway.chat_policy import ChatPolicy


def make_class(*names):
    """A class of the first name, derived from those of the others, as a framework defines them."""
    base = Exception
    for name in reversed(names):
        module, _, own_name = name.rpartition(".")
        base = type(own_name, (base,), {"__module__": module})
    return base


POLICY_ERRORS = [
    ("agents.exceptions.ModelBehaviorError", "agents.exceptions.AgentsException"),
    ("agents.exceptions.MaxTurnsExceeded", "agents.exceptions.AgentsException"),
    ("langgraph.errors.GraphRecursionError",),
    ("langchain_core.exceptions.OutputParserException",),
    (
        "langchain.agents.structured_output.A",
        "langchain.agents.structured_output.StructuredOutputError",
    ),
    ("pydantic_ai.exceptions.AgentRunError",),
    ("pydantic_ai.exceptions.UnexpectedModelBehavior", "pydantic_ai.exceptions.AgentRunError"),
    ("pydantic_ai.exceptions.UsageLimitExceeded", "pydantic_ai.exceptions.AgentRunError"),
    ("smolagents.utils.AgentMaxStepsError", "smolagents.utils.AgentError"),
    ("smolagents.utils.AgentParsingError", "smolagents.utils.AgentError"),
    ("minisweagent.agents.default.LimitsExceeded",),
    ("my_agent.TooLong", "agents.exceptions.MaxTurnsExceeded"),
]
OTHER_ERRORS = [
    ("agents.exceptions.UserError", "agents.exceptions.AgentsException"),
    ("pydantic_ai.exceptions.UserError",),
    (
        "pydantic_ai.exceptions.ModelHTTPError",
        "pydantic_ai.exceptions.ModelAPIError",
        "pydantic_ai.exceptions.AgentRunError",
    ),
    ("smolagents.utils.AgentGenerationError", "smolagents.utils.AgentError"),
    ("smolagents.utils.AgentToolExecutionError", "smolagents.utils.AgentExecutionError"),
    ("openai.APIConnectionError",),
    ("my_agent.MaxTurnsExceeded",),
]


@pytest.mark.parametrize("names", POLICY_ERRORS, ids=lambda names: names[0])
def test_policy_causes_what_frameworks_raise_for_its_output(names):
    assert PolicyErrors().contains(make_class(*names)("x"))
    assert PolicyErrors().contains(ExceptionGroup("x", [make_class(*names)("x")]))


@pytest.mark.parametrize("names", OTHER_ERRORS, ids=lambda names: names[0])
def test_policy_does_not_cause_errors_of_code_and_services(names):
    error = make_class(*names)("x")
    assert not PolicyErrors().contains(error)
    assert not PolicyErrors().contains(ExceptionGroup("x", [PolicyError("x"), error]))


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ("json.JSONDecodeError", json.JSONDecodeError("x", "", 0)),
        ("json.decoder.JSONDecodeError", json.JSONDecodeError("x", "", 0)),
        ("LookupError", KeyError("x")),
        ("my_framework.GaveUp", make_class("my_framework.core.errors.GaveUp")("x")),
        ("GaveUp", AgentCommandError("x", class_name="GaveUp")),
        ("my_framework.GaveUp", AgentCommandError("x", class_name="my_framework.core.GaveUp")),
    ],
    ids=["exported", "defined", "subclass", "moved", "of a program", "moved, of a program"],
)
def test_further_classes_are_named_in_the_configuration(entry, error):
    assert not PolicyErrors().contains(error)
    assert PolicyErrors([entry]).contains(error)


def test_class_of_the_agents_own_file_is_named_by_its_file(tmp_path):
    file = tmp_path / "gives_up.py"
    file.write_text("class GaveUp(Exception):\n    pass\n")
    errors = PolicyErrors([f"{file}:GaveUp"])
    module = next(item for name, item in sys.modules.items() if name.startswith("gives_up_"))
    assert errors.contains(module.GaveUp("x"))


@pytest.mark.parametrize(
    "entry",
    ["", "json.", "a b", "json.NoSuchError", "json.dumps", "print", "no_such_file.py:Error"],
    ids=["empty", "no name", "space", "unknown", "function", "built-in function", "no file"],
)
def test_what_names_no_exception_is_refused(entry):
    with pytest.raises(ConfigError) as caught:
        PolicyErrors([entry])
    assert caught.value.key == "rollout.agent.policy_errors"


def asks_then_raises(error):
    """An agent that gets one answer of the policy."""

    async def agent(prompt, base_url, api_key):
        await post(base_url, api_key, "/chat/completions", {"model": "m", "messages": prompt})
        raise error

    return agent


MAX_TURNS = make_class("agents.exceptions.MaxTurnsExceeded")("Max turns (10) exceeded")


async def run_once(codec, agent, **options):
    tree = await grow(codec, agent, group_size=1, **options)
    return tree.trajectories[0]


@pytest.mark.parametrize(
    ("error", "rewards"),
    [
        (MAX_TURNS, {}),
        (ExceptionGroup("tasks", [MAX_TURNS]), {}),
        (PolicyError("no patch"), {}),
        (PolicyError("half of it", 0.5), {"agent": 0.5}),
        (PolicyError("parts", {"tests": 1, "style": 0}), {"agent.tests": 1.0, "agent.style": 0.0}),
    ],
    ids=["framework", "group", "own", "with a reward", "with parts"],
)
async def test_attempt_that_the_policy_ends_by_an_error_is_trained_on(codec, error, rewards):
    trajectory = await run_once(codec, asks_then_raises(error))
    assert trajectory.stop_reason is StopReason.policy_error
    assert not trajectory.failed
    assert trajectory.tool_rewards == rewards
    assert sum(trajectory.loss_mask) > 0
    assert trajectory.turns[-1].outcome.answer.startswith("the agent raised ")


@pytest.mark.parametrize(
    "error",
    [OSError("disk full"), EnvironmentFailedError("reset"), PolicyError("x", float("nan"))],
    ids=["of the machine", "of the environment", "with a reward that is none"],
)
async def test_other_errors_are_failures_that_name_the_agent(codec, error):
    trajectory = await run_once(codec, asks_then_raises(error))
    assert trajectory.stop_reason is StopReason.agent_failure
    assert "agent" in trajectory.failure_reason


async def test_error_of_the_policy_after_a_failed_engine_is_a_failure(codec):
    async def goes_on(prompt, base_url, api_key):
        body = {"model": "m", "messages": prompt}
        await post(base_url, api_key, "/chat/completions", body)
        with pytest.raises(RuntimeError):
            other = [{"role": "user", "content": "Again."}]
            await post(base_url, api_key, "/chat/completions", {"model": "m", "messages": other})
        raise MAX_TURNS

    policy = ChatPolicy(codec, fails=lambda number: number == 2)
    trajectory = await run_once(codec, goes_on, policy=policy)
    assert trajectory.stop_reason is StopReason.agent_failure


async def test_error_before_any_answer_is_not_the_policys(codec):
    async def raises(prompt):
        raise MAX_TURNS

    trajectory = await run_once(codec, raises)
    assert trajectory.stop_reason is StopReason.agent_failure
    assert "the agent raised agents.exceptions.MaxTurnsExceeded" in trajectory.failure_reason


async def test_text_of_an_error_is_bounded_and_may_be_unreadable(codec):
    class Unreadable(Exception):
        def __str__(self):
            raise KeyError("x")

    for error in (OSError("x" * 100_000), Unreadable()):
        trajectory = await run_once(codec, asks_then_raises(error))
        assert trajectory.stop_reason is StopReason.agent_failure
        assert len(trajectory.failure_reason) < 3000


ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "m", "messages": task["prompt"]}).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
urllib.request.urlopen(request).read()
class GaveUp(Exception): pass
def raise_deeply(error): raise error
"""
FRAMEWORK = """
import types
MaxTurnsExceeded = type("MaxTurnsExceeded", (Exception,), {"__module__": "agents.exceptions"})
"""


@pytest.mark.parametrize(
    ("program", "stop_reason", "entries"),
    [
        (f"{FRAMEWORK}raise_deeply(MaxTurnsExceeded('10'))", StopReason.policy_error, ()),
        ("raise_deeply(GaveUp('x\\ny: z'))", StopReason.policy_error, ["GaveUp"]),
        ("raise_deeply(GaveUp())", StopReason.agent_crash, ()),
        ("print(json.dumps({'error': 'PolicyError'})); sys.exit(3)", StopReason.policy_error, ()),
        ("print(json.dumps({'error': 'Other'})); sys.exit(3)", StopReason.agent_crash, ()),
        ("print(json.dumps({'error': 'PolicyError'}))", StopReason.eos, ()),
        ("print('[' * 9999); sys.exit('agents.MaxTurnsExceeded: x')", StopReason.agent_crash, ()),
    ],
    ids=[
        *("traceback", "configured", "unknown", "line of JSON", "other line"),
        *("line of a success", "no line and no traceback"),
    ],
)
async def test_command_names_the_exception_that_ended_it(codec, program, stop_reason, entries):
    agent = CommandAgent(command=[sys.executable, "-c", ASK + program])
    trajectory = await run_once(
        codec, agent, policy=ChatPolicy(codec, call_rate=0), policy_errors=entries
    )
    assert trajectory.stop_reason is stop_reason
