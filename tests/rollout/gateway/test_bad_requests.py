"""Bodies that no SDK sends: each gets an answer or an error of its dialect, never a crash."""

from __future__ import annotations

import asyncio
import copy
import json

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mega_agentrl.types.records import FinishReason, Generation
from tests.rollout.gateway.gateway_run import make_session_scope, open_gateway

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
BODIES = {
    "/v1/chat/completions": {
        "model": "m",
        "max_completion_tokens": 9,
        "stop": ["!"],
        "temperature": 0.5,
        "tool_choice": "auto",
        "tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}],
        "messages": [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
    },
    "/v1/responses": {
        "model": "m",
        "max_output_tokens": 9,
        "instructions": "Add.",
        "reasoning": {"effort": "low"},
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "message", "role": "assistant", "content": "So."},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Add."}],
        "stop_sequences": ["!"],
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "", "signature": ""},
                    {"type": "text", "text": "So."},
                    {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c",
                        "content": [{"type": "text", "text": "3"}],
                    },
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
    },
}
LISTS = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/v1/messages": "messages"}
DEEP = "@deep@"
DEEP_JSON = "[" * 700 + "]" * 700
VALUES = st.sampled_from(
    [
        *(None, True, -1, 0, 1.5, 10**30, -(10**400), float("nan"), float("inf"), 1e300),
        *("", "user", "assistant", "function", "text", "image", "\ud800", "\0", "é", DEEP),
        *("<|im_start|>", "data:image/png;base64,AAAA", "https://127.0.0.1/a.png", PNG),
        *([], {}, [[]], [None], {"type": "image"}, {"type": "text", "text": 1}, ["x"]),
        *('{"a": 1e999}', '{"a": "\\ud800"}', "[1]", "{", "{" * 3000),
        f'{{"a": {DEEP_JSON}}}',
    ]
)


class PoliteEngine:
    """Says the same to everything."""

    version = 1

    def __init__(self, codec):
        self._token_ids = (*codec.encode("Hello."), codec.eos_id)

    async def generate(self, request):
        count = min(len(self._token_ids), request.max_tokens)
        is_whole = count == len(self._token_ids)
        return Generation(
            request_id=request.request_id,
            token_ids=self._token_ids[:count],
            logps=(-1.0,) * count,
            entropies=(1.0,) * count,
            argmax_ids=self._token_ids[:count],
            finish_reason=FinishReason.eos if is_whole else FinishReason.length,
            stop_string=None,
            version=1,
        )

    async def abort(self, request_id):
        pass


@pytest.fixture(scope="module")
def post(codec):
    """Sends a body to a path; status and JSON. Each body goes to a session of its own."""
    with asyncio.Runner() as runner:
        opened = open_gateway()
        gateway = runner.run(opened.__aenter__())
        http = runner.run(_open_client())

        async def send(path, content):
            key, session = gateway.open_session(make_session_scope(codec, PoliteEngine(codec)))
            headers = {"x-api-key": key}
            async with http.post(gateway.url + path, data=content, headers=headers) as response:
                body = await response.read()
            await gateway.close_session(key)
            session.build_response()  # what was captured can be trained on
            return response.status, body

        yield lambda path, content: runner.run(send(path, content))
        runner.run(http.close())
        runner.run(opened.__aexit__(None, None, None))


async def _open_client():
    return aiohttp.ClientSession()


def check_error_form(path, status, content):
    """The error has the form that the dialect's SDK reads."""
    body = json.loads(content)
    assert 400 <= status < 500
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["type"] == "invalid_request_error"
    assert (body.get("type") == "error") == path.startswith("/v1/messages")


def paths_of(value, path=()):
    """Paths of all values in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths_of(value[key], (*path, key))


@st.composite
def mutated_bodies(draw):
    """A path, and a body for it in which some values are replaced or missing."""
    path = draw(st.sampled_from([*BODIES, "/v1/messages/count_tokens"]))
    body = copy.deepcopy(BODIES[path.removesuffix("/count_tokens")])
    for _ in range(draw(st.integers(1, 3))):
        *front, last = draw(st.sampled_from([item for item in paths_of(body) if item]))
        holder = body
        for key in front:
            holder = holder[key]
        if draw(st.integers(0, 3)):
            holder[last] = copy.deepcopy(draw(VALUES))
        else:
            del holder[last]
    text = json.dumps(body)
    return path, text.replace(json.dumps(DEEP), DEEP_JSON).encode()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(mutated_bodies())
def test_mutated_bodies_get_an_answer_or_an_error_of_the_dialect(post, case):
    path, content = case
    status, body = post(path, content)
    if status != 200:
        check_error_form(path, status, body)


@pytest.mark.parametrize("path", BODIES, ids=["chat", "responses", "anthropic"])
def test_the_body_that_the_mutations_start_from_is_answered(post, path):
    status, body = post(path, json.dumps(BODIES[path]).encode())
    assert (status, b"Hello." in body) == (200, True)


NOT_JSON = {
    "empty": b"",
    "list": b"[]",
    "broken": b'{"messages": [',
    "bytes": b"\xff\xfe",
    "nested": b'{"x":' + b"[" * 100_000,
    "surrogate_bytes": b'{"messages": "\xed\xa0\x80"}',
}


@pytest.mark.parametrize("path", BODIES, ids=["chat", "responses", "anthropic"])
@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON)
def test_a_body_that_is_no_json_object_is_refused(post, path, content):
    check_error_form(path, *post(path, content))


def changed(path, **fields):
    """A body with other fields; `items` replaces the conversation."""
    items = {LISTS[path]: fields.pop("items")} if "items" in fields else {}
    return {**BODIES[path], **items, **fields}


CHAT, RESPONSES, ANTHROPIC = BODIES
USER = {"role": "user", "content": "Hi"}
URL_SOURCE = {"type": "url", "url": "https://127.0.0.1/a.png"}
BAD_SOURCE = {"type": "base64", "media_type": "image/png", "data": "%%%"}
REFUSED = {
    "chat_no_message": (CHAT, changed(CHAT, items=[]), "messages"),
    "chat_role": (CHAT, changed(CHAT, items=[{"role": "boss", "content": ""}]), "role"),
    "chat_two_answers": (CHAT, changed(CHAT, n=2), "n"),
    "chat_old_functions": (CHAT, changed(CHAT, functions=[]), "functions"),
    "chat_old_call": (
        CHAT,
        changed(CHAT, items=[USER, {"role": "assistant", "function_call": {"name": "add"}}]),
        "messages[1].function_call",
    ),
    "chat_hosted_tool": (CHAT, changed(CHAT, tools=[{"type": "custom"}]), "tools[0]"),
    "chat_zero_tokens": (CHAT, changed(CHAT, max_completion_tokens=0), "max_tokens"),
    "chat_image_address": (
        CHAT,
        changed(
            CHAT,
            items=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}],
                }
            ],
        ),
        "messages[0].content[0].image_url",
    ),
    "responses_no_item": (RESPONSES, changed(RESPONSES, items=[]), "input"),
    "responses_no_text": (RESPONSES, changed(RESPONSES, items=""), "input"),
    "responses_role": (
        RESPONSES,
        changed(RESPONSES, items=[{"role": "tool", "content": ""}]),
        "input[0].role",
    ),
    "responses_hosted_tool": (
        RESPONSES,
        changed(RESPONSES, tools=[{"type": "web_search"}]),
        "tools[0].type",
    ),
    "responses_hosted_item": (
        RESPONSES,
        changed(RESPONSES, items=[{"type": "web_search_call", "id": "w"}]),
        "input[0].type",
    ),
    "responses_conversation": (
        RESPONSES,
        changed(RESPONSES, conversation="conv_1"),
        "conversation",
    ),
    "responses_file": (
        RESPONSES,
        changed(
            RESPONSES,
            items=[{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}],
        ),
        "input[0].content[0]",
    ),
    "responses_image_base64": (
        RESPONSES,
        changed(
            RESPONSES,
            items=[
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": "data:image/png;base64,%%%"}],
                }
            ],
        ),
        "input[0].content[0].image_url",
    ),
    "anthropic_no_message": (ANTHROPIC, changed(ANTHROPIC, items=[]), "messages"),
    "anthropic_no_limit": (ANTHROPIC, changed(ANTHROPIC, max_tokens=None), "max_tokens"),
    "anthropic_prefill": (
        ANTHROPIC,
        changed(
            ANTHROPIC,
            items=[
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}],
                },
            ],
        ),
        "messages[1]",
    ),
    "anthropic_hosted_tool": (
        ANTHROPIC,
        changed(ANTHROPIC, tools=[{"type": "web_search_20250305", "name": "web_search"}]),
        "tools[0]",
    ),
    "anthropic_servers": (
        ANTHROPIC,
        changed(ANTHROPIC, mcp_servers=[{"type": "url"}]),
        "mcp_servers",
    ),
    "anthropic_document": (
        ANTHROPIC,
        changed(ANTHROPIC, items=[{"role": "user", "content": [{"type": "document"}]}]),
        "$.messages[0].content[0].type",
    ),
    "anthropic_image_address": (
        ANTHROPIC,
        changed(
            ANTHROPIC,
            items=[{"role": "user", "content": [{"type": "image", "source": URL_SOURCE}]}],
        ),
        "messages[0].content[0].source.type",
    ),
    "anthropic_image_base64": (
        ANTHROPIC,
        changed(
            ANTHROPIC,
            items=[{"role": "user", "content": [{"type": "image", "source": BAD_SOURCE}]}],
        ),
        "messages[0].content[0].source.data",
    ),
    "anthropic_tool_result_of_assistant": (
        ANTHROPIC,
        changed(
            ANTHROPIC,
            items=[
                {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
                USER,
            ],
        ),
        "messages[0].content[0]",
    ),
}


@pytest.mark.parametrize(("path", "body", "key"), REFUSED.values(), ids=REFUSED)
def test_unsupported_fields_are_refused_by_name(post, path, body, key):
    status, content = post(path, json.dumps(body).encode())
    check_error_form(path, status, content)
    assert key in json.loads(content)["error"]["message"]


@pytest.mark.parametrize("path", BODIES, ids=["chat", "responses", "anthropic"])
def test_half_a_surrogate_pair_is_refused_and_named(post, path):
    body = changed(path, items=[{"role": "user", "content": "\ud800"}])
    status, content = post(path, json.dumps(body).encode())
    check_error_form(path, status, content)
    assert "surrogate" in json.loads(content)["error"]["message"]


@pytest.mark.parametrize("path", BODIES, ids=["chat", "responses", "anthropic"])
def test_image_for_a_policy_of_text_is_refused(post, path):
    url = f"data:image/png;base64,{PNG}"
    part = {
        CHAT: {"type": "image_url", "image_url": {"url": url}},
        RESPONSES: {"type": "input_image", "image_url": url},
        ANTHROPIC: {"type": "image", "source": {"type": "base64", "data": PNG}},
    }[path]
    status, content = post(
        path, json.dumps(changed(path, items=[{"role": "user", "content": [part]}])).encode()
    )
    check_error_form(path, status, content)
    assert "vision" in json.loads(content)["error"]["message"]
