"""What holds for all three APIs, through their unmodified SDKs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import anthropic
import openai
import pytest

from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.rollout.gateway import server
from mega_agentrl.rollout.gateway.chat import ErrorKind, GatewayError
from mega_agentrl.rollout.gateway.dialects.base import make_call
from mega_agentrl.types.errors import EngineLostError
from mega_agentrl.types.records import Role, StopReason, ToolCall
from tests.chat_models import save_tokenizer
from tests.rollout.chat_run import call
from tests.rollout.gateway.gateway_run import (
    check_one_context,
    open_scripted_session,
    sampled_text,
)
from tests.rollout.gateway.sdk_clients import CLIENTS, error_text, to_wire

QUESTION = {"role": "user", "content": "How much is it?"}
TURNS = [
    f"<think>sum</think>Let me add. {call(a=1, b=2)}{call(a=3, b=4)}",
    f"{call(a=3, b=7)}",
    "<think>sure</think>It is 10.",
    "You are welcome.",
]


@pytest.fixture(params=CLIENTS)
def make_client(request, monkeypatch):
    """Makes a client of one SDK from address and key; its retries come at once."""
    for sdk in (openai, anthropic):
        monkeypatch.setattr(sdk._base_client, "INITIAL_RETRY_DELAY", 0.001)
    return CLIENTS[request.param]


async def run_tools(client, ask, alter=list):
    """A conversation of four turns with three calls; the replies. alter: of the history."""
    history = [QUESTION]
    replies = []
    for results in (["3", "7"], ["10"], None, None):
        reply = await ask(alter(history))
        replies.append(reply)
        history += reply.items
        if results is not None:
            history += client.tool_results(reply, results)
        else:
            history.append({"role": "user", "content": "Thank you."})
    return replies


async def test_tool_calls_go_out_and_their_answers_come_back_in_the_same_context(
    codec, make_client
):
    async with open_scripted_session(codec, TURNS) as (url, key, session, script):
        client = make_client(url, key)
        first, second, third, _ = await run_tools(client, client.ask)
    assert (first.text, first.reasoning, first.finish) == (
        "Let me add.",
        "sum",
        client.tool_calls,
    )
    assert [item[1:] for item in first.calls] == [
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": 3, "b": 4}),
    ]
    assert len({item[0] for item in first.calls + second.calls}) == 3
    assert third.text == "It is 10."
    assert third.num_prompt_tokens == len(script.requests[2].token_ids)
    check_one_context(codec, session, TURNS)
    turns = session.build_response().token_buffer.turns
    roles = "assistant tool tool assistant tool assistant user assistant"
    assert [turn.role.value for turn in turns] == roles.split()
    assert {turn.outcome.tool for turn in turns if turn.role == Role.tool} == {"add"}
    assert session.stop_reason is StopReason.eos


async def test_streams_give_the_same_messages(codec, make_client):
    async with open_scripted_session(codec, TURNS) as (url, key, session, _):
        client = make_client(url, key)
        streamed = await run_tools(client, client.stream)
        check_one_context(codec, session, TURNS)
    async with open_scripted_session(codec, TURNS) as (url, key, _, _):
        client = make_client(url, key)
        whole = await run_tools(client, client.ask)
    for one, other in zip(streamed, whole, strict=True):
        assert (one.text, one.reasoning, one.finish) == (other.text, other.reasoning, other.finish)
        assert [item[1:] for item in one.calls] == [item[1:] for item in other.calls]
        assert one.num_prompt_tokens == other.num_prompt_tokens
        assert one.num_answer_tokens == other.num_answer_tokens


@pytest.mark.parametrize(
    "alteration",
    [
        *("without_reasoning", "with_other_json", "with_parts"),
        pytest.param("with_strings", marks=pytest.mark.extended),
        pytest.param("with_other_ids", marks=pytest.mark.extended),
    ],
)
async def test_histories_that_clients_alter_continue_the_same_context(
    codec, make_client, alteration
):
    async with open_scripted_session(codec, TURNS) as (url, key, session, _):
        client = make_client(url, key)
        change = getattr(client, alteration)

        def alter(history):
            return [item for old in to_wire(history) for item in change(old)]

        await run_tools(client, client.ask, alter)
        check_one_context(codec, session, TURNS)


UNUSUAL_ARGUMENTS = {
    "large_numbers": '{"a": 12345678901234567890123, "b": -1e300, "c": 9007199254740993}',
    "whole_floats": '{"a": 1.0, "b": -0.0, "c": 1e2}',
    "half_a_surrogate_pair": r'{"a": "\ud800"}',
    "other_scripts": '{"\u4f60": "\U0001f600 \u00e9", "b": [null, true, {"c": ""}]}',
    "nested": '{"a": ' + "[" * 50 + "]" * 50 + "}",
    "none": "{}",
}
QUICK_ARGUMENTS = ("large_numbers", "half_a_surrogate_pair")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(text, id=name, marks=() if name in QUICK_ARGUMENTS else pytest.mark.extended)
        for name, text in UNUSUAL_ARGUMENTS.items()
    ],
)
async def test_unusual_arguments_come_back_in_the_same_context(codec, make_client, arguments):
    body = f'{{"name": "add", "arguments": {arguments}}}'
    turns = [f"<tool_call>{body}</tool_call>", "It is 10."]
    async with open_scripted_session(codec, turns) as (url, key, session, _):
        client = make_client(url, key)
        first = await client.ask([QUESTION])
        sent = [item for old in to_wire(first.items) for item in client.with_other_json(old)]
        await client.ask([QUESTION, *sent, *client.tool_results(first, ["10"])])
        check_one_context(codec, session, turns)


async def test_sampling_settings_of_a_client_are_ignored_with_a_warning(codec, make_client):
    async with open_scripted_session(codec, ["Hello."]) as (url, key, _, script):
        client = make_client(url, key)
        warning = await client.warning([QUESTION], **client.settings)
    assert "temperature" in warning
    assert "top_p" in warning
    assert (script.requests[0].temperature, script.requests[0].top_p) == (1.0, 1.0)


async def test_settings_of_zero_are_named_in_the_warning(codec, make_client):
    async with open_scripted_session(codec, ["Hello."]) as (url, key, _, _):
        client = make_client(url, key)
        warning = await client.warning([QUESTION], **client.zeros)
    for name in client.zeros.get("extra_body", client.zeros):
        assert f"{name} has no effect" in warning


CLOSED_THOUGHT = """{%- if add_generation_prompt and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}"""
"""Qwen 3's template closes the thought of the next turn where it is not enabled."""


async def test_variables_of_the_chat_template_hold_for_each_turn(tmp_path, make_client):
    codec = HFCodec(save_tokenizer("qwen3", tmp_path, lambda template: template + CLOSED_THOUGHT))
    turns = [f"{call(a=1, b=2)}", "It is 3."]
    options = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    async with open_scripted_session(codec, turns) as (url, key, session, script):
        client = make_client(url, key)
        first = await client.ask([QUESTION], **options)
        history = [QUESTION, *first.items, *client.tool_results(first, ["3"])]
        await client.ask(history, **options)
        check_one_context(codec, session, turns)
        for request in script.requests:
            assert codec.decode(request.token_ids).endswith("<think>\n\n</think>\n\n")
        with pytest.raises(client.errors.BadRequestError, match="chat_template_kwargs"):
            other = {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
            await client.ask([QUESTION], extra_body=other)


WRITTEN = f"<think>sum</think>Let me add. {call(a=1, b=2)} Then more."
"""A turn with a call, as an agent expects it that has described its tools in the prompt."""


@pytest.mark.parametrize("offers", ["no tools", "tools that must not be called"])
async def test_text_of_a_call_stays_text_where_the_client_takes_no_calls(
    codec, make_client, offers
):
    turns = [WRITTEN, "It is 3."]
    async with open_scripted_session(codec, turns, max_tool_calls=0) as (url, key, session, _):
        client = make_client(url, key)
        options = {"tool_choice": client.no_calls} if offers != "no tools" else {"tools": []}
        first = await client.ask([QUESTION], **options)
        assert first.text == WRITTEN.removeprefix("<think>sum</think>")
        assert first.reasoning == "sum"
        assert (first.calls, first.finish == client.length) == ([], False)
        result = {"role": "user", "content": "<tool_response>\n3\n</tool_response>"}
        second = await client.ask([QUESTION, *first.items, result], **options)
        assert second.text == "It is 3."
        check_one_context(codec, session, turns)


async def test_call_that_an_agent_writes_anew_continues_the_same_context(codec, make_client):
    turns = [WRITTEN, "It is 3."]
    rewritten = '<tool_call>{"arguments": {"b": 2.0,"a":1},"name": "add"}</tool_call>'
    text = f"Let me add. {rewritten} Then more."
    async with open_scripted_session(codec, turns) as (url, key, session, _):
        client = make_client(url, key)
        await client.ask([QUESTION], tools=[])
        history = [QUESTION, {"role": "assistant", "content": text}]
        await client.ask([*history, {"role": "user", "content": "3"}], tools=[])
        check_one_context(codec, session, turns)


@pytest.mark.parametrize("name", ["anthropic", "chat", "chat, prefix of a message"])
async def test_answer_continues_a_turn_that_the_client_has_begun(codec, name):
    """The client appends the answer to its beginning, and goes on with the whole turn."""
    turns = [" 10, of course.", "You are welcome."]
    begun = {"role": "assistant", "content": "It is"}
    options, last = {}, begun
    if name == "chat":
        options = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}
    elif name != "anthropic":
        last = {**begun, "prefix": True}
    async with open_scripted_session(codec, turns) as (url, key, session, script):
        client = CLIENTS[name.partition(",")[0]](url, key)
        first = await client.ask([QUESTION, last], **options)
        assert first.text == turns[0].rstrip()
        whole = {"role": "assistant", "content": f"It is{first.text}"}
        await client.ask([QUESTION, whole, {"role": "user", "content": "Thank you."}])
        response = session.build_response()
    before, after = (request.token_ids for request in script.requests)
    assert codec.decode(before).endswith("assistant\nIt is")
    sampled = (*codec.encode(turns[0]), codec.eos_id)
    assert after[: len(before) + len(sampled)] == (*before, *sampled)
    assert "It is 10, of course." in codec.decode(after)
    assert sampled_text(codec, session) == "".join(turns)
    assert response.context_resets[0].token_ids == before


async def test_results_are_shown_in_the_order_of_their_calls(codec, make_client):
    turns = [f"{call(a=1, b=2)}{call(a=3, b=4)}", "Done."]
    async with open_scripted_session(codec, turns) as (url, key, session, script):
        client = make_client(url, key)
        first = await client.ask([QUESTION])
        swapped = replace(first, calls=first.calls[::-1])
        results = client.tool_results(swapped, ["seven", "three"])
        await client.ask([QUESTION, *first.items, *results])
        shown = codec.decode(script.requests[1].token_ids)
        assert shown.index("three") < shown.index("seven")
        check_one_context(codec, session, turns)


@pytest.mark.parametrize(
    ("options", "reason", "limit"),
    [
        ({"max_response_tokens": 3}, StopReason.length, "rollout.max_response_tokens"),
        ({"max_turns": 1}, StopReason.turn_limit, "rollout.max_turns"),
    ],
    ids=["tokens", "turns"],
)
async def test_spent_budget_is_a_stop_for_length_then_an_error_without_retry(
    codec, make_client, options, reason, limit
):
    async with open_scripted_session(codec, ["Hello."] * 9, **options) as (url, key, session, _):
        client = make_client(url, key)
        requests = []
        entering = session.entering
        session.entering = lambda **options: requests.append(options) or entering(**options)
        history = [QUESTION]
        finishes = []
        with pytest.raises(client.errors.BadRequestError, match=limit):
            for _ in range(9):
                reply = await client.ask(history)
                finishes.append(reply.finish)
                history += [*reply.items, {"role": "user", "content": "Go on."}]
    assert finishes[-1] == client.length
    assert len(requests) == len(finishes) + 1
    assert session.stop_reason is reason


@pytest.mark.extended
async def test_other_keys_are_refused(codec, make_client):
    async with open_scripted_session(codec, ["Hello."]) as (url, _, _, script):
        client = make_client(url, "sk-guess")
        with pytest.raises(client.errors.AuthenticationError):
            await client.ask([QUESTION])
    assert not script.requests


@pytest.mark.extended
async def test_key_may_be_part_of_the_base_url(codec, make_client):
    async with open_scripted_session(codec, ["Hello."]) as (url, key, _, _):
        reply = await make_client(f"{url}/sessions/{key}", "unused").ask([QUESTION])
    assert reply.text == "Hello."


async def test_conversation_that_is_too_long_is_refused_without_retry(codec, make_client):
    session_of = open_scripted_session(codec, ["Hello."], max_model_len=900)
    async with session_of as (url, key, session, script):
        client = make_client(url, key)
        requests = count_requests(session)
        with pytest.raises(client.errors.BadRequestError) as caught:
            await client.ask([{"role": "user", "content": "x" * 900}])
    assert client.too_long in error_text(caught.value)
    assert len(requests) == 1
    assert not script.requests


async def test_overloaded_gateway_is_asked_again(codec, make_client):
    async with open_scripted_session(codec, TURNS) as (url, key, session, _):
        client = make_client(url, key)
        requests = count_requests(session, GatewayError(ErrorKind.overloaded, "busy"))
        await run_tools(client, client.ask)
        check_one_context(codec, session, TURNS)
    assert len(requests) == len(TURNS) + 1


async def test_engine_failure_is_retried_and_the_retry_continues(codec, make_client):
    async with open_scripted_session(codec, TURNS) as (url, key, session, script):
        client = make_client(url, key)
        fail_once(script)
        await run_tools(client, client.ask)
        check_one_context(codec, session, TURNS)
    assert session.stop_reason is StopReason.eos


@pytest.mark.extended
async def test_engine_failures_without_end_are_the_servers_error(codec, make_client):
    async with open_scripted_session(codec, TURNS) as (url, key, session, script):
        client = make_client(url, key, max_retries=0)
        fail_once(script)
        with pytest.raises(client.errors.InternalServerError):
            await client.ask([QUESTION])
    assert session.stop_reason is StopReason.aborted


@pytest.mark.extended
async def test_events_that_keep_a_stream_open_are_ignored(codec, make_client, monkeypatch):
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.02)
    async with open_scripted_session(codec, TURNS) as (url, key, session, script):
        wait_first(script)
        client = make_client(url, key)
        await run_tools(client, client.stream)
        check_one_context(codec, session, TURNS)


async def test_engine_failure_during_a_stream_is_an_error_of_the_sdk(
    codec, make_client, monkeypatch
):
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.02)
    async with open_scripted_session(codec, TURNS) as (url, key, session, script):
        fail_once(script)
        wait_first(script)
        client = make_client(url, key)
        with pytest.raises(client.errors.APIError, match="engine 0 died"):
            await client.stream([QUESTION])
        await run_tools(client, client.stream)
        check_one_context(codec, session, TURNS)


def count_requests(session, *first_errors):
    """A list that gets the messages of each request; the first requests get these errors."""
    requests, errors = [], list(first_errors)
    admit = session.admit

    async def counted(read, *sizes, **options):
        requests.append(read().messages)
        if errors:
            raise errors.pop()
        return await admit(read, *sizes, **options)

    session.admit = counted
    return requests


def fail_once(script):
    """The next call of an engine fails."""
    generate = script.generate

    async def failing(_):
        script.generate = generate
        raise EngineLostError("engine 0 died")

    script.generate = failing


def wait_first(script):
    """The next call of an engine waits."""
    generate = script.generate

    async def waiting(request):
        script.generate = generate
        await asyncio.sleep(0.1)
        return await generate(request)

    script.generate = waiting


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{}", {}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        (None, {}),
        ('"{}"', {}),
        ({}, {}),
        ('{"a": 1}', {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("hello", {"_text": "hello"}),
        ("[1]", {"_text": "[1]"}),
        ('{"a": 1', {"_text": '{"a": 1'}),
    ],
)
def test_arguments_in_a_history_are_read_as_the_policys_own(written, arguments):
    assert make_call("now", written) == ToolCall(tool="now", arguments=arguments)
