"""What only the dialect of Anthropic's messages has."""

from __future__ import annotations

import json

import anthropic
import pytest
from anthropic import beta_async_tool, omit

from mega_agentrl.rollout.gateway.dialects.anthropic import AnthropicMessages
from mega_agentrl.types.records import ToolCall, ToolStatus
from mega_agentrl.vision.placeholders import content_text
from tests.rollout.chat_run import call
from tests.rollout.gateway.gateway_run import check_one_context, open_scripted_session
from tests.rollout.gateway.sdk_clients import AnthropicClient

QUESTION = {"role": "user", "content": "How much is it?"}
TURNS = [f"<think>sum</think>{call(a=1, b=2)}{call(a=3, b=4)}", call(a="x"), "It is 10."]


@beta_async_tool
async def add(a: int, b: int) -> str:
    """Sum of two numbers.

    Args:
        a: One number.
        b: The other number.
    """
    return str(a + b)


@pytest.mark.parametrize("thread", [omit, False], ids=["new_messages", "whole_history"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_tool_runner_of_the_sdk_stays_in_one_context(codec, thread, stream):
    async with open_scripted_session(codec, TURNS) as (url, key, session, _):
        runner = AnthropicClient(url, key).client.beta.messages.tool_runner(
            model="m",
            max_tokens=1000,
            system="Add.",
            messages=[QUESTION],
            tools=[add],
            thread=thread,
            stream=stream,
        )
        final = await runner.until_done()
        check_one_context(codec, session, TURNS)
    assert final.content[0].text == "It is 10."
    turns = session.build_response().token_buffer.turns
    outcomes = [turn.outcome for turn in turns if turn.outcome is not None]
    assert [outcome.answer for outcome in outcomes[:2]] == ["3", "7"]
    assert [outcome.status for outcome in outcomes] == [
        ToolStatus.ok,
        ToolStatus.ok,
        ToolStatus.user_error,  # the SDK says `is_error`
    ]


async def test_thread_of_another_session_is_replayed_by_the_sdk(codec):
    async with open_scripted_session(codec, ["One."]) as (url, key, _, _):
        client = anthropic.AsyncAnthropic(base_url=url, api_key=key)
        thread = client.beta.messages.thread(model="m", max_tokens=100, system="Count.")
        await thread.send({"role": "user", "content": "1?"})
        assert thread.previous_message_id is not None
        async with open_scripted_session(codec, ["Two."]) as (url, key, session, script):
            client.base_url, client.api_key = url, key
            reply = await thread.send({"role": "user", "content": "2?"})
    assert reply.content[0].text == "Two."
    assert len(script.requests) == 1
    conversation = session.tree.roots[0].continuations[0].continuations[0].conversation
    assert [message["role"] for message in conversation] == ["system", "user", "assistant", "user"]


async def test_tokens_are_counted_without_a_change_of_the_tree(codec):
    async with open_scripted_session(codec, ["Hello.", "Bye."]) as (url, key, session, script):
        client = AnthropicClient(url, key)
        history = [QUESTION]
        for _ in range(2):
            count = await client.client.messages.count_tokens(
                model="m", messages=history, tools=[client.tool]
            )
            before = (len(session.tree.roots), session.tree.num_response_tokens)
            reply = await client.ask(history)
            assert count.input_tokens == reply.num_prompt_tokens
            assert count.input_tokens == len(script.requests[-1].token_ids)
            if len(history) > 1:
                assert before == (1, len("Hello.") + 1)
            else:
                assert before == (0, 0)
            history += [*reply.items, {"role": "user", "content": "Thank you."}]


async def test_stop_sequence_is_named(codec):
    async with open_scripted_session(codec, ["Hello!"]) as (url, key, _, script):
        generate = script.generate

        async def stopped(request):
            assert request.stop == ("!",)
            generation = await generate(request)
            object.__setattr__(generation, "stop_string", "!")
            return generation

        script.generate = stopped
        client = anthropic.AsyncAnthropic(base_url=url, api_key=key)
        message = await client.messages.create(
            model="m", max_tokens=9, messages=[QUESTION], stop_sequences=["!"]
        )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "!")
    assert message.content[0].text == "Hello"


async def test_thinking_has_a_signature_in_answers_and_in_streams(codec):
    turns = ["<think>sum</think>It is 10."]
    blocks = []
    for method in ("create", "stream"):
        async with open_scripted_session(codec, turns) as (url, key, _, _):
            messages = anthropic.AsyncAnthropic(base_url=url, api_key=key).messages
            options = {"model": "m", "max_tokens": 100, "messages": [QUESTION]}
            if method == "create":
                message = await messages.create(**options)
            else:
                async with messages.stream(**options) as stream:
                    message = await stream.get_final_message()
            blocks.append(message.content[0])
    assert blocks[0] == blocks[1]
    assert blocks[0].signature


async def test_address_that_is_not_served_is_an_error_of_the_api(codec):
    async with open_scripted_session(codec, []) as (url, key, _, _):
        client = anthropic.AsyncAnthropic(base_url=url, api_key=key)
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.batches.list()
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("kind", "name", "parameter"),
    [
        ("bash_20250124", "bash", "command"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "old_str"),
        ("memory_20250818", "memory", "path"),
    ],
    ids=["bash", "editor", "memory"],
)
async def test_tools_that_the_client_runs_are_shown_with_their_parameters(
    codec, kind, name, parameter
):
    turns = [call(name, **{parameter: "x"}), "Done."]
    async with open_scripted_session(codec, turns) as (url, key, session, script):
        client = AnthropicClient(url, key)
        tools = [{"type": kind, "name": name}]
        first = await client.ask([QUESTION], tools=tools)
        assert first.calls[0][1:] == (name, {parameter: "x"})
        history = [QUESTION, *first.items, *client.tool_results(first, ["ok"])]
        await client.ask(history, tools=tools)
        check_one_context(codec, session, turns)
    assert f'"{parameter}"' in codec.decode(script.requests[0].token_ids)


BILLING = "x-anthropic-billing-header: cc_version=2; cch=1f"


@pytest.mark.parametrize(
    ("system", "shown"),
    [
        (f"{BILLING}\nYou are careful.", ["You are careful."]),
        ([{"type": "text", "text": f"{BILLING}\nYou are careful."}], ["You are careful."]),
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "Add."}], ["Add."]),
        (f"You are Claude Code.\n{BILLING}\r\nBe careful.", ["You are Claude Code.\nBe careful."]),
        (BILLING, []),
        (f"{BILLING}\n", []),
        (f"What is {BILLING}?", [f"What is {BILLING}?"]),
    ],
    ids=["text", "block", "own block", "in between", "alone", "with its end", "mentioned"],
)
def test_only_the_line_that_numbers_requests_leaves_the_system_prompt(system, shown):
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "m", "max_tokens": 9, "system": system, "messages": messages}
    *first, _ = AnthropicMessages().parse_request(json.dumps(body).encode()).messages
    assert [content_text(message["content"]) for message in first] == shown


def test_request_becomes_a_conversation():
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AQI="},
    }
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f"},
            {"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [{"name": "add", "description": "Sum.", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}, image]},
            {"role": "assistant", "content": [{"type": "text", "text": "So."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                    {"type": "tool_use", "id": "c2", "name": "see", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c2", "content": [image]},
                    {"type": "tool_result", "tool_use_id": "c1", "is_error": True},
                    {"type": "text", "text": "Well?"},
                ],
            },
            {"role": "system", "content": "Be short."},
        ],
    }
    request = AnthropicMessages().parse_request(json.dumps(body).encode())
    calls = (ToolCall(tool="add", arguments={"a": 1}), ToolCall(tool="see", arguments={}))
    seen = {"type": "image", "data": b"\1\2"}
    assert request.messages == (
        {"role": "system", "content": [{"type": "text", "text": "Add."}]},
        {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}, seen]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "So."}],
            "tool_calls": calls,
        },
        {"role": "tool", "content": "", "name": "add", "is_error": True},
        {"role": "tool", "content": [seen], "name": "see"},
        {"role": "user", "content": [{"type": "text", "text": "Well?"}]},
        {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
    )
    function = {"name": "add", "description": "Sum.", "parameters": {"type": "object"}}
    assert request.tools == ({"type": "function", "function": function},)
