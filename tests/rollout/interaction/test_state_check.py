"""Conversations about a to-do list: what passes is the state and the results after each turn."""

from __future__ import annotations

import asyncio
import json
from functools import wraps
from pathlib import Path

import pytest

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.rl_dataset import read_prompts
from mega_agentrl.rollout.interaction.session import InteractionRegistry
from mega_agentrl.rollout.interaction.state_check import StateCheckUser
from mega_agentrl.tool.api_classes import ApiClasses
from mega_agentrl.types.records import StopReason
from tests.chat_models import save_tokenizer
from tests.fakes import make_prompt
from tests.rollout.chat_run import converse, make_kit, prompt_for

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CLASSES = [f"{EXAMPLES}/my_api.py:TodoList"]
SCENARIO = {"initial_config": json.dumps({"TodoList": {"tasks": {"buy milk": 1}}})}
TURNS = ["What should I do first?", "That is done."]
TRUTH = [["add(name='rent', priority=3)"], ["most_urgent()"], ["TodoList.finish('rent')"]]


def call(tool, /, **arguments):
    """Return a call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


ADD, ASK = call("add", name="rent", priority=3), call("most_urgent")
FINISH = call("finish", name="rent")


def in_real_time(test):
    """Run a coroutine as a test in real time, since virtual time does not wait for threads."""

    @wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return HFCodec(save_tokenizer("llama3", tmp_path_factory.mktemp("llama3")))


def kwargs(**changes):
    return {**SCENARIO, "turns": TURNS, "ground_truth": TRUTH, **changes}


async def conversation(codec, messages, *, options=None, **changes):
    """Return the trajectory of a policy that says the messages."""
    kit = make_kit(codec, *ApiClasses(CLASSES).tools())
    tools = {"add": {"create_kwargs": SCENARIO}, "most_urgent": {}, "finish": {}}
    given = {"extra_info": {"interaction_kwargs": kwargs(**changes)}, "tools_kwargs": tools}
    got, _ = await converse(
        codec,
        messages,
        kit=kit,
        prompt=prompt_for(codec, kit, **given),
        interactions=InteractionRegistry([StateCheckUser(CLASSES)]),
        **(options or {}),
    )
    return got


@pytest.mark.parametrize(
    ("messages", "reward"),
    [
        ([ADD, "ok", ASK, "rent", FINISH, "bye"], 1.0),
        (
            [call("add", name="rent"), FINISH, ADD, "ok", ASK, "rent", FINISH, "bye"],
            1.0,
        ),
        ([call("finish", name="x"), ADD, "ok", ASK, "rent", FINISH, "bye"], 1.0),
        ([call("add", name="rent", priority="high"), ADD, "ok", ASK, "r", FINISH, "bye"], 1.0),
        ([ADD + ASK, "ok", ASK, "rent", FINISH, "bye"], 1.0),
        ([call("add", name="rent", priority=2), "ok"], 0.0),
        ([ADD, "ok", "rent, surely"], 0.0),
        ([ADD, "ok", call("finish", name="x"), "rent"], 0.0),
        ([ADD, ASK, "ok", call("finish", name="x"), "rent", FINISH, "bye"], 1.0),
    ],
    ids=[
        *("right", "another_path", "an_exception", "a_refused_call", "two_at_once"),
        *("wrong_state", "no_call", "missing_result", "result_of_an_earlier_turn"),
    ],
)
@in_real_time
async def test_a_conversation_ends_with_its_reward(codec, messages, reward):
    got = await conversation(codec, messages)
    assert got.stop_reason is StopReason.interaction_end
    assert got.tool_rewards == {"state_check": reward}
    assert ("That is done." in got.response_text) == bool(reward)


@in_real_time
async def test_a_turn_without_an_expected_call_counts_by_its_state_alone(codec):
    truth = [[], ["add(name='rent', priority=3)"], TRUTH[2]]
    right = await conversation(codec, ["?", ADD, "ok", FINISH, "bye"], ground_truth=truth)
    looked = await conversation(codec, [ASK, "?", ADD, "ok", FINISH, "bye"], ground_truth=truth)
    milk = call("finish", name="buy milk")
    changed = await conversation(codec, [milk, "?", ADD, "ok"], ground_truth=truth)
    rewards = [one.tool_rewards["state_check"] for one in (right, looked, changed)]
    assert rewards == [1.0, 1.0, 0.0]


@in_real_time
async def test_calls_beyond_the_limit_have_not_been_made(codec):
    truth = [["add(name='a')", "add(name='b')"]]
    both = call("add", name="a") + call("add", name="b")
    for limit, reward in ((2, 1.0), (1, 0.0)):
        got = await conversation(
            codec, [both, "ok"], turns=[], ground_truth=truth, options={"max_tool_calls": limit}
        )
        assert got.tool_rewards == {"state_check": reward}


@in_real_time
async def test_a_conversation_that_does_not_reach_its_end_has_no_reward(codec):
    got = await conversation(codec, [ADD, "ok", ASK, "rent"], options={"max_turns": 4})
    assert got.stop_reason is StopReason.turn_limit
    assert got.tool_rewards == {"state_check": 0.0}


@in_real_time
async def test_an_excluded_function_changes_nothing():
    user = StateCheckUser(CLASSES)
    asked = [{"role": "user", "content": "?"}]
    made = [{"role": "assistant", "content": FINISH}, {"role": "tool", "content": "no such tool"}]
    for excluded, reward in (([], 0.0), (["finish"], 1.0)):
        config = {"TodoList": {"tasks": {"rent": 1}}}
        given = kwargs(turns=[], ground_truth=[["most_urgent()"]], initial_config=config)
        state = await user.create(given | {"excluded_functions": excluded})
        calls = [{"role": "assistant", "content": ASK}, {"role": "tool", "content": "rent"}]
        end = [{"role": "assistant", "content": "rent"}]
        await user.respond(state, [*asked, *calls, *made, *end])
        assert await user.calc_reward(state) == reward


@in_real_time
async def test_a_fork_goes_on_with_copies_on_both_sides(codec):
    kit = make_kit(codec, *ApiClasses(CLASSES).tools())
    user = InteractionRegistry([StateCheckUser(CLASSES)])
    prompt = prompt_for(codec, kit, extra_info={"interaction_kwargs": kwargs()})
    tools, session = kit.open_session(), user.open_session(prompt)
    await tools.create({"add": {"create_kwargs": SCENARIO}, "most_urgent": {}, "finish": {}})
    await session.create()
    assert session.can_fork

    async def turn(tools, session, messages, text):
        """Make a call and end the turn."""
        (made,) = kit.parse_calls(text)
        outcome = await tools.execute(made.tool, made.arguments)
        messages += [{"role": "assistant", "content": text}]
        messages += [{"role": "tool", "content": outcome.answer}]
        messages += [{"role": "assistant", "content": "ok"}]
        reply, is_last = await session.respond(messages)
        messages += [{"role": "user", "content": reply.answer}]
        return outcome.answer, is_last

    messages = [{"role": "user", "content": "?"}]
    await turn(tools, session, messages, ADD)
    branch, branch_session, branch_messages = await tools.fork(), await session.fork(), [*messages]
    assert await turn(branch, branch_session, branch_messages, FINISH) == ("rent is done", True)
    assert await turn(tools, session, messages, ASK) == ("rent", False)
    assert await turn(tools, session, messages, FINISH) == ("rent is done", True)
    assert await session.calc_reward() == {"state_check": 1.0}
    assert await branch_session.calc_reward() == {"state_check": 0.0}
    for one in (tools, branch, session, branch_session):
        await one.release()


@in_real_time
async def test_calls_that_take_too_long_do_not_pass_and_are_no_failure_of_the_user(tmp_path):
    file = tmp_path / "slow_api.py"
    file.write_text(
        "import time\n\n\nclass Slow:\n    def wait(self, seconds: float) -> str:\n"
        '        """Waits."""\n        time.sleep(seconds)\n        return "done"\n'
    )
    user = StateCheckUser([f"{file}:Slow"])
    user.timeout_s = 2.0
    registry = InteractionRegistry([user])
    scenario = {"turns": ["More."], "ground_truth": [["wait(0.0)"], ["wait(0.0)"]]}
    prompt = make_prompt(extra_info={"interaction_kwargs": scenario})
    session = registry.open_session(prompt)
    await session.create()
    messages = [
        {"role": "user", "content": "Wait."},
        {"role": "assistant", "content": call("wait", seconds=1.5)},
        {"role": "tool", "content": "Timed out."},
        {"role": "assistant", "content": "ok"},
    ]
    _, is_last = await session.respond(messages)
    assert is_last
    assert await session.calc_reward() == {"state_check": 0.0}
    await session.release()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ground_truth": TRUTH[:2]}, "ground_truth"),
        ({"ground_truth": [["add("], [], []]}, "expected a call"),
        ({"ground_truth": [["add(name=open('x'))"], [], []]}, "malformed node"),
        ({"ground_truth": [["_load_scenario({})"], [], []]}, "_load_scenario"),
        (
            {"ground_truth": [["add(title='x')"], [], []]},
            "ground_truth, call of add",
        ),
        ({"initial_config": "{"}, "initial_config"),
        ({"involved_classes": ["Calendar"]}, "Calendar"),
        ({"truth": []}, "truth"),
    ],
    ids=[
        *("one_turn_less", "no_call", "no_literal", "private", "unknown_parameter"),
        *("no_json", "unknown_class", "unknown_key"),
    ],
)
def test_kwargs_that_cannot_be_checked_are_refused(changes, named):
    with pytest.raises(ValueError) as caught:
        StateCheckUser(CLASSES).check_kwargs(kwargs(**changes))
    assert named in str(caught.value)


def test_the_example_s_questions_fit_its_tools_and_user(monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    (row,) = read_prompts(
        [DataFile("examples/my_api_questions.jsonl")], DataConfig(), key="data.train"
    )
    InteractionRegistry([StateCheckUser(CLASSES)]).check_prompt_kwargs([row.prompt])
    api = ApiClasses(CLASSES)
    assert list(row.prompt.tools_kwargs) == [one.name for one in api.tools()]
    api.check_scenario(row.prompt.tools_kwargs["add"]["create_kwargs"])
