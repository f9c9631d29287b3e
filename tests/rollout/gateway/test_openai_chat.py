"""The unmodified OpenAI SDK against the gateway: chat completions."""

from __future__ import annotations

import json

import openai
import pytest

from mega_agentrl.types.records import StopReason
from tests.rollout.chat_run import call
from tests.rollout.gateway.gateway_run import open_scripted_session

QUESTION = {"role": "user", "content": "How much is it?"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def client_of(url, key, **options):
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **options)


def sampled_text(codec, session):
    """Decoded text of all tokens with loss mask 1."""
    buffer = session.build_response().token_buffer
    pairs = zip(buffer.token_ids, buffer.loss_mask, strict=True)
    return codec.decode([token for token, mask in pairs if mask])


async def test_tool_calls_go_out_and_their_answers_come_back_in_the_same_context(codec):
    turns = [f"<think>sum</think>Let me add. {call(a=1, b=2)}{call(a=3, b=4)}", "It is 10."]
    async with open_scripted_session(codec, turns) as (url, key, session, script):
        client = client_of(url, key)
        messages = [QUESTION]
        first = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "Let me add."
        assert message.reasoning_content == "sum"
        arguments = [json.loads(item.function.arguments) for item in message.tool_calls]
        assert arguments == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        # The SDK's object is sent back as the SDK writes it.
        messages.append(message)
        for item, answer in zip(message.tool_calls, ("3", "7"), strict=True):
            messages.append({"role": "tool", "tool_call_id": item.id, "content": answer})
        second = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        assert second.choices[0].message.content == "It is 10."
        assert second.choices[0].finish_reason == "stop"
        assert second.usage.completion_tokens == len("It is 10.") + 1
    before, after = (request.token_ids for request in script.requests)
    said = script.requests[0]
    sampled = session.tree.roots[0].continuations[0].token_ids
    assert after[: len(before) + len(sampled)] == (*said.token_ids, *sampled)
    response = session.build_response()
    assert [turn.role.value for turn in response.token_buffer.turns] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert sampled_text(codec, session) == "".join(turns)
    assert session.stop_reason is StopReason.eos


async def test_stream_gives_the_same_message(codec):
    turns = [f"<think>sum</think>Let me add. {call(a=1, b=2)}"]
    async with open_scripted_session(codec, turns) as (url, key, _, _):
        stream = client_of(url, key).chat.completions.stream(
            model="m", messages=[QUESTION], tools=[ADD], stream_options={"include_usage": True}
        )
        async with stream as events:
            final = await events.get_final_completion()
    message = final.choices[0].message
    assert message.content == "Let me add."
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage.completion_tokens == len(codec.encode(turns[0])) + 1


async def test_settings_of_the_run_hold_and_the_answer_says_so(codec):
    async with open_scripted_session(codec, ["Hello."]) as (url, key, _, script):
        raw = await client_of(url, key).chat.completions.with_raw_response.create(
            model="m", messages=[QUESTION], temperature=0.1, top_p=0.5
        )
    assert "temperature" in raw.headers["x-gateway-warning"]
    assert "top_p" in raw.headers["x-gateway-warning"]
    assert (script.requests[0].temperature, script.requests[0].top_p) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("options", "reason", "limit"),
    [
        ({"max_response_tokens": 3}, StopReason.length, "rollout.max_response_tokens"),
        ({"max_turns": 1}, StopReason.turn_limit, "rollout.max_turns"),
    ],
    ids=["tokens", "turns"],
)
async def test_spent_budget_is_a_stop_for_length_then_an_error_without_retry(
    codec, options, reason, limit
):
    async with open_scripted_session(codec, ["Hello."] * 9, **options) as (url, key, session, _):
        client = client_of(url, key)
        messages = [QUESTION]
        finishes = []
        with pytest.raises(openai.BadRequestError) as caught:
            for _ in range(9):
                answer = await client.chat.completions.create(model="m", messages=messages)
                finishes.append(answer.choices[0].finish_reason)
                messages += [answer.choices[0].message, {"role": "user", "content": "Go on."}]
    assert finishes[-1] == "length"
    assert caught.value.code == "budget_spent"
    assert limit in caught.value.message
    assert session.stop_reason is reason


async def test_other_keys_are_refused(codec):
    async with open_scripted_session(codec, ["Hello."]) as (url, _, _, script):
        with pytest.raises(openai.AuthenticationError):
            await client_of(url, "sk-guess").chat.completions.create(model="m", messages=[QUESTION])
    assert not script.requests


async def test_key_may_be_part_of_the_base_url(codec):
    async with open_scripted_session(codec, ["Hello."]) as (url, key, _, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/sessions/{key}/v1", api_key="unused")
        answer = await client.chat.completions.create(model="m", messages=[QUESTION])
        models = await client.models.list()
    assert answer.choices[0].message.content == "Hello."
    assert [model.id for model in models.data] == ["policy"]
