"""What only the dialect of OpenAI's responses has."""

from __future__ import annotations

import json

import openai
import pytest
from openai.lib.responses_tool_runner import AsyncRegisteredFunction, AsyncResponsesToolRunner

from mega_agentrl.rollout.gateway.dialects.openai_responses import OpenAIResponses
from mega_agentrl.types.records import ToolCall
from tests.rollout.chat_run import call
from tests.rollout.gateway.gateway_run import check_one_context, open_scripted_session
from tests.rollout.gateway.sdk_clients import ResponsesClient

TURNS = [f"<think>sum</think>Adding. {call(a=1, b=2)}{call(a=3, b=4)}", "It is 10.", "Bye."]


async def test_previous_response_is_continued_by_its_id(codec):
    async with open_scripted_session(codec, TURNS) as (url, key, session, _):
        client = ResponsesClient(url, key)
        responses = client.client.responses
        shared = {"model": "m", "tools": [client.tool]}
        first = await responses.create(input="How much is it?", **shared)
        calls = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": text}
            for item, text in zip(calls, ("3", "7"), strict=True)
        ]
        second = await responses.create(input=results, previous_response_id=first.id, **shared)
        await responses.create(input="Thank you.", previous_response_id=second.id, **shared)
        check_one_context(codec, session, TURNS)
    assert second.previous_response_id == first.id


async def test_outputs_between_parallel_calls_stay_in_one_context(codec):
    async with open_scripted_session(codec, TURNS) as (url, key, session, _):
        client = ResponsesClient(url, key)
        history = [{"role": "user", "content": "How much is it?"}]
        first = await client.ask(history)
        outputs = client.tool_results(first, ["3", "7"])
        *front, one, two = first.items
        history += [*front, one, outputs[0], two, outputs[1]]
        second = await client.ask(history)
        await client.ask([*history, *second.items, {"role": "user", "content": "Thank you."}])
        check_one_context(codec, session, TURNS)


async def test_instructions_are_not_inherited_from_the_previous_response(codec):
    async with open_scripted_session(codec, ["One.", "Two.", "Three."]) as (url, key, session, _):
        responses = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key).responses
        first = await responses.create(model="m", input="1?", instructions="Count.")
        second = await responses.create(
            model="m", input="2?", instructions="Stop.", previous_response_id=first.id
        )
        await responses.create(model="m", input="3?", previous_response_id=second.id)
    conversation = [("user", "1?"), ("assistant", "One."), ("user", "2?"), ("assistant", "Two.")]
    assert [_shown(root.messages) for root in session.tree.roots] == [
        [("system", "Count."), ("user", "1?")],
        [("system", "Stop."), ("user", "1?")],
        [("user", "1?")],
    ]
    last = session.tree.roots[2]
    while last.continuations:
        last = last.continuations[-1]
    assert _shown(last.conversation) == [*conversation, ("user", "3?"), ("assistant", "Three.")]


async def test_unknown_previous_response_is_an_error(codec):
    async with open_scripted_session(codec, ["Hello."]) as (url, key, _, script):
        responses = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key).responses
        with pytest.raises(openai.BadRequestError) as caught:
            await responses.create(model="m", input="Hi", previous_response_id="resp_other")
    assert caught.value.code == "previous_response_not_found"
    assert not script.requests


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_tool_runner_of_the_sdk_stays_in_one_context(codec, stream):
    async def add(arguments):
        return str(arguments["a"] + arguments["b"])

    async with open_scripted_session(codec, TURNS) as (url, key, session, _):
        client = ResponsesClient(url, key)
        runner = AsyncResponsesToolRunner(functions=[AsyncRegisteredFunction(client.tool, add)])
        final = await runner.run(
            client.client, {"model": "m", "input": "How much is it?"}, stream=stream
        )
        check_one_context(codec, session, TURNS[:2])
    assert final.output_text == "It is 10."


async def test_stream_of_an_answer_that_is_cut_ends_incomplete(codec):
    async with open_scripted_session(codec, ["Hello."]) as (url, key, _, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        stream = client.responses.stream(model="m", input="Hi", max_output_tokens=3)
        async with stream as events:
            *_, last = [event async for event in events]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output_text == "Hel"


@pytest.mark.parametrize(
    ("kinds", "num_turns"),
    [
        ("reasoning message call call", 1),
        ("reasoning call reasoning call", 2),
        ("message message", 2),
        ("call message", 2),
        ("message reasoning message", 2),
    ],
)
def test_items_of_one_turn_are_one_message(kinds, num_turns):
    items = {
        "reasoning": {"type": "reasoning", "id": "r", "summary": []},
        "message": {"type": "message", "role": "assistant", "content": "So."},
        "call": {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
    }
    sent = [{"role": "user", "content": "Hi"}, *(items[kind] for kind in kinds.split())]
    request = OpenAIResponses().parse_request(json.dumps({"model": "m", "input": sent}).encode())
    turns = request.messages[1:]
    assert {turn["role"] for turn in turns} == {"assistant"}
    assert len(turns) == num_turns
    calls = [item for turn in turns for item in turn["tool_calls"]]
    assert calls == [ToolCall(tool="add", arguments={"a": 1})] * kinds.count("call")


def test_request_becomes_a_conversation():
    image = {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AQI="}
    body = {
        "model": "m",
        "instructions": "Add.",
        "tools": [{"type": "function", "name": "add", "description": "Sum.", "strict": True}],
        "input": [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}, image]},
            {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [image]},
            {"type": "function_call_output", "call_id": "d", "output": "3"},
        ],
    }
    request = OpenAIResponses().parse_request(json.dumps(body).encode())
    seen = {"type": "image", "data": b"\1\2"}
    assert request.messages == (
        {"role": "system", "content": "Add."},
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}, seen]},
        {"role": "assistant", "content": "", "tool_calls": (ToolCall(tool="see", arguments={}),)},
        {"role": "tool", "content": [seen], "name": "see"},
        {"role": "tool", "content": "3"},
    )
    assert request.num_instructions == 1
    parameters = {"type": "object", "properties": {}}
    function = {"name": "add", "description": "Sum.", "parameters": parameters}
    assert request.tools == ({"type": "function", "function": function},)


def _shown(messages):
    """Role and text of each message."""
    return [(message["role"], message["content"]) for message in messages]


@pytest.mark.parametrize(("truncation", "is_named"), [("auto", True), ("disabled", False)])
async def test_truncation_that_would_cut_a_conversation_has_no_effect(codec, truncation, is_named):
    async with open_scripted_session(codec, ["Hello."]) as (url, key, _, _):
        client = ResponsesClient(url, key)
        warning = await client.warning(
            [{"role": "user", "content": "Hello."}], truncation=truncation, **client.settings
        )
    assert ("truncation" in warning) is is_named
