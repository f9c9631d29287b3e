"""What a client can make the gateway do and hold is bounded, per session and in total."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading

import aiohttp
import msgspec
import pytest

from mega_agentrl.rollout.gateway import limits, server, session, work_threads
from mega_agentrl.rollout.gateway.chat import ChatRequest, ErrorKind, GatewayError
from mega_agentrl.rollout.gateway.dialects import base
from mega_agentrl.rollout.gateway.limits import ByteBudget, SharedResources
from mega_agentrl.rollout.gateway.request_size import check_decoding_work
from mega_agentrl.rollout.gateway.session import MAX_RUNNING_REQUESTS, AgentSession
from mega_agentrl.tool.call_protocol.json_text import parse_float
from mega_agentrl.types.records import StopReason
from tests.chat_models import Script
from tests.rollout.gateway.gateway_run import make_session_scope, open_gateway
from tests.rollout.gateway.test_bad_requests import BODIES, PoliteEngine, check_error_form

PATHS = pytest.mark.parametrize("path", BODIES, ids=["chat", "responses", "anthropic"])
CHAT, RESPONSES, ANTHROPIC = BODIES
COUNT = f"{ANTHROPIC}/count_tokens"


class _Numbers(msgspec.Struct):
    top_p: float


class HeldEngine(PoliteEngine):
    """Answers when it is released."""

    def __init__(self, codec):
        super().__init__(codec)
        self.num_requests = 0
        self.released = asyncio.Event()

    async def generate(self, request):
        self.num_requests += 1
        await self.released.wait()
        return await super().generate(request)


def user(text):
    return {"role": "user", "content": text}


def request_of(*messages, **fields):
    return ChatRequest(messages=messages or (user("Hi."),), options={}, **fields)


async def admit(agent_session, request, num_bytes=0):
    """The future answer to a request, entered as the server does."""
    with agent_session.entering():
        _, answering = await agent_session.admit(lambda: request, num_bytes)
    return answering


async def refusal(agent_session, request):
    """The error of a request that is refused."""
    with pytest.raises(GatewayError) as caught:
        await admit(agent_session, request, 1 << 20)
    return caught.value


def make_session(codec, engine=None, *, shared=None, **options):
    return AgentSession(make_session_scope(codec, engine or PoliteEngine(codec), **options), shared)


TOO_LONG = {
    "characters": request_of(user("x" * (16 * 10_000 + 1))),
    "characters_of_a_tool": request_of(tools=({"description": "x" * (16 * 10_000 + 1)},)),
    "messages": request_of(*[user("")] * 10_001),
}
TOO_MANY = {
    "stop_strings": request_of(stop=("x",) * 17),
    "characters_of_a_stop_string": request_of(stop=("x" * 257,)),
    "images": request_of({"role": "user", "content": [{"type": "image", "data": b"x"}] * 501}),
}


@pytest.mark.parametrize(
    ("request_", "kind"),
    [(request, ErrorKind.context_length) for request in TOO_LONG.values()]
    + [(request, ErrorKind.invalid_request) for request in TOO_MANY.values()],
    ids=[*TOO_LONG, *TOO_MANY],
)
async def test_size_of_a_request_is_checked_before_it_is_encoded(
    codec, monkeypatch, request_, kind
):
    agent_session = make_session(codec, max_model_len=10_000)
    monkeypatch.setattr(agent_session, "encoder", None)
    monkeypatch.setattr(agent_session.tree, "look_up", None)
    error = await refusal(agent_session, request_)
    assert error.kind is kind
    assert agent_session.limit_reached is (
        StopReason.length if request_ in TOO_LONG.values() else None
    )


async def test_conversation_is_encoded_no_further_than_the_context_reaches(codec, monkeypatch):
    agent_session = make_session(codec, max_model_len=100)
    encode_next, encoded = agent_session.encoder.encode_next, []

    def encode(messages, *rest):
        encoded.append(messages)
        return encode_next(messages, *rest)

    monkeypatch.setattr(agent_session.encoder, "encode_next", encode)
    turns = [user("What is it?"), {"role": "assistant", "content": "It is so."}] * 50
    error = await refusal(agent_session, request_of(*turns, user("So?")))
    assert error.kind is ErrorKind.context_length
    assert 0 < len(encoded) < 10
    assert not agent_session.tree.roots


async def test_long_work_is_done_in_threads_and_each_has_its_own_tokenizer(codec, monkeypatch):
    agent_session = make_session(codec, max_model_len=1_000_000)
    encoder, used = agent_session.encoder, []
    encode_first = encoder.encode_first

    def encode(*arguments):
        used.append((threading.current_thread(), encoder._codec))
        return encode_first(*arguments)

    monkeypatch.setattr(encoder, "encode_first", encode)
    sizes = (100, work_threads.MAX_LOOP_BYTES, work_threads.MAX_MEDIUM_BYTES)
    answers = [
        await (await admit(agent_session, request_of(user("x <|im_end|>" * (size // 12))), size))
        for size in sizes
    ]
    assert len({answer.num_prompt_tokens for answer in answers}) == 3
    threads, codecs = zip(*used, strict=True)
    assert threads[0] is threading.current_thread()
    assert len({id(thread) for thread in threads}) == len({id(item) for item in codecs}) == 3
    assert codecs[0] is codec
    for block in agent_session.tree.roots:  # the same tokens in each thread
        assert list(block.token_ids) == codec.apply_chat_template(
            list(block.messages), variables={}
        )


async def test_one_request_of_a_session_is_encoded_at_a_time(codec, monkeypatch):
    agent_session = make_session(codec, max_model_len=1_000_000)
    encode_first = agent_session.encoder.encode_first
    num_running, peak = 0, 0

    def encode(*arguments):
        nonlocal num_running, peak
        num_running += 1
        peak = max(peak, num_running)
        result = encode_first(*arguments)
        num_running -= 1
        return result

    monkeypatch.setattr(agent_session.encoder, "encode_first", encode)
    sizes = (work_threads.MAX_LOOP_BYTES, work_threads.MAX_MEDIUM_BYTES) * 3
    requests = [request_of(user(f"{i} {'x' * size}")) for i, size in enumerate(sizes)]
    await asyncio.gather(*(admit(agent_session, request) for request in requests))
    assert peak == 1
    assert len(agent_session.tree.roots) == 6


async def test_refused_requests_leave_nothing_in_the_tree(codec):
    engine = HeldEngine(codec)
    agent_session = make_session(codec, engine)
    running = [
        await admit(agent_session, request_of(user(f"Question {i}")))
        for i in range(MAX_RUNNING_REQUESTS)
    ]
    for i in range(5):
        error = await refusal(agent_session, request_of(user(f"Another {i}")))
        assert error.kind is ErrorKind.overloaded
    assert len(agent_session.tree.roots) == MAX_RUNNING_REQUESTS
    engine.released.set()
    await asyncio.gather(*running)
    await (await admit(agent_session, request_of(user("Now"))))


async def test_requests_that_enter_at_once_are_bounded(codec):
    agent_session = make_session(codec)
    entered = [agent_session.entering(is_retry=True) for _ in range(MAX_RUNNING_REQUESTS)]
    for entering in entered:
        entering.__enter__()
    assert (await refusal(agent_session, request_of())).kind is ErrorKind.overloaded
    entered[0].__exit__(None, None, None)
    await (await admit(agent_session, request_of()))


async def test_session_that_was_refused_too_often_has_reached_a_limit(codec, monkeypatch):
    monkeypatch.setattr(session, "MAX_REFUSED_REQUESTS", 3)
    agent_session = make_session(codec)
    bad = request_of(stop=("x",) * 17)
    kinds = [(await refusal(agent_session, bad)).kind for _ in range(4)]
    assert kinds == [ErrorKind.invalid_request] * 3 + [ErrorKind.budget_spent]
    assert agent_session.limit_reached is StopReason.length


async def test_bytes_that_a_session_holds_are_bounded_and_given_back(codec):
    held = ByteBudget(80_000, 1_000_000)
    agent_session = make_session(codec, shared=SharedResources(held=held))
    await (await admit(agent_session, request_of(user("x" * 1000))))
    one = held.held_by(agent_session)
    assert one > 40 * 1000
    assert held.total == one
    error = await refusal(agent_session, request_of(user("y" * 1000)))
    assert error.kind is ErrorKind.too_large
    assert agent_session.limit_reached is StopReason.length
    assert len(agent_session.tree.roots) == 1
    await agent_session.close()
    assert held.total == 0


def test_owner_below_its_share_may_take_bytes_when_the_total_is_reached():
    budget = ByteBudget(max_per_owner=80, max_total=100)
    assert budget.take("a", 80)
    assert not budget.take("a", 1)  # its own bound
    assert budget.take("b", 20)
    assert budget.take("c", 33)  # a third, although all is taken
    assert not budget.take("c", 1)
    assert not budget.take("b", 14)
    assert (budget.total, budget.most) == (133, 80)
    budget.give_back("a", 80)
    assert budget.take("b", 14)
    budget.give_back("b")
    budget.give_back("c")
    assert (budget.total, budget.most) == (0, 0)


async def test_bytes_that_are_given_back_go_to_who_waits():
    budget = ByteBudget(max_per_owner=10, max_total=10)
    budget.add("a", 10)
    waiting = asyncio.create_task(budget.acquire("a", 4))
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.give_back("a", 10)
    await waiting
    assert budget.held_by("a") == 4


async def test_of_simultaneous_requests_as_many_are_sampled_as_there_are_turns(codec):
    engine = HeldEngine(codec)
    agent_session = make_session(codec, engine, max_turns=3)
    requests = [request_of(user(f"Question {i}")) for i in range(60)]
    tasks = [asyncio.create_task(admit(agent_session, request)) for request in requests]
    answering = await asyncio.gather(*tasks)
    while engine.num_requests < 3:
        await asyncio.sleep(0)
    engine.released.set()
    answers = await asyncio.gather(*answering)
    assert [bool(answer.content) for answer in answers] == [True] * 3 + [False] * 57
    assert engine.num_requests == agent_session.tree.num_answers == 3
    assert len(agent_session.tree.roots) == 3
    assert agent_session.stop_reason is StopReason.turn_limit


async def test_of_simultaneous_tool_calls_as_many_run_as_the_limit_says(codec):
    agent_session = make_session(codec, max_tool_calls=5)
    calls = (agent_session.call_tool("add", {"a": i, "b": 1}) for i in range(200))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, GatewayError)]
    assert len(errors) == 195
    assert {error.kind for error in errors} == {ErrorKind.budget_spent}
    await agent_session.scope.tools.release()


@pytest.mark.parametrize("state", ["closed", "spent"])
async def test_tokens_are_not_counted_for_a_session_that_takes_no_requests(codec, state):
    agent_session = make_session(codec, max_turns=1)
    await (await admit(agent_session, request_of()))
    if state == "closed":
        await agent_session.close()
    else:
        await (await admit(agent_session, request_of()))
    with pytest.raises(GatewayError) as caught, agent_session.entering():
        await agent_session.count_tokens(request_of, 0)
    expected = ErrorKind.unknown_key if state == "closed" else ErrorKind.budget_spent
    assert caught.value.kind is expected


async def send(codec, path, content, headers=(), **settings):
    """Status and body of the answer to one body, and the usage of the gateway afterwards."""
    async with open_gateway(**settings) as gateway, aiohttp.ClientSession() as http:
        key, _ = gateway.open_session(make_session_scope(codec, PoliteEngine(codec)))
        headers = {"x-api-key": key, **dict(headers)}
        async with http.post(gateway.url + path, data=content, headers=headers) as response:
            answer = response.status, await response.read()
        usage = gateway.usage()
        assert (usage.num_sessions, usage.num_connections) == (1, 1)
        assert (usage.bytes_in_flight, usage.most_bytes_held) == (0, usage.bytes_held)
        return *answer, usage


async def chunks(number):
    for _ in range(number):
        yield b" " * (1 << 18)


@PATHS
@pytest.mark.parametrize("content", [b" " * ((1 << 20) + 1), 5], ids=["declared", "in_chunks"])
async def test_body_above_the_limit_is_refused(codec, path, content):
    content = chunks(content) if isinstance(content, int) else content
    status, body, _ = await send(codec, path, content, max_body_mib=1)
    assert status == 413
    assert "max_body_mib" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("path", [*BODIES, COUNT, "/v1/tools/add"])
@pytest.mark.parametrize("content", [gzip.compress(b"{}"), b"no gzip"], ids=["gzip", "no_gzip"])
async def test_compressed_body_is_refused_and_not_unpacked(codec, path, content):
    status, body, _ = await send(codec, path, content, {"content-encoding": "gzip"})
    check_error_form(path, status, body)
    assert "content-encoding" in json.loads(body)["error"]["message"]


@PATHS
async def test_number_of_values_is_checked_before_a_body_is_decoded(codec, path):
    content = b'{"metadata": [' + b"[]," * (16 * 10_000) + b"[]]}"
    status, body, usage = await send(codec, path, content)
    check_error_form(path, status, body)
    assert "commas and brackets" in json.loads(body)["error"]["message"]
    assert usage.bytes_held == 0


@pytest.mark.parametrize(
    ("value", "what"),
    [
        pytest.param(b"1," * (1 << 17), "commas and brackets", id="values"),
        pytest.param(b'"k":1' * (1 << 17), "colons", id="keys"),
        pytest.param(rb"\u00e9" * (1 << 18), "backslashes", id="escapes"),
        pytest.param(b"1" * 4000 + b" " + b"2" * (1 << 17), "digits of long numbers", id="digits"),
    ],
)
def test_cost_of_decoding_is_bounded_by_the_context_length(value, what):
    for body in (value, bytearray(value)):
        with pytest.raises(GatewayError) as caught:
            check_decoding_work(body, 1000)
        assert caught.value.kind is ErrorKind.context_length
        assert f" {what}," in str(caught.value)
        check_decoding_work(body, 1 << 20)
    check_decoding_work(value[: len(value) // 16], 1000)


@pytest.mark.parametrize("body_type", [dict, _Numbers], ids=["untyped", "typed"])
def test_numbers_are_read_where_other_threads_can_run(monkeypatch, body_type):
    numbers = []
    decoder = msgspec.json.Decoder(float_hook=lambda text: numbers.append(text) or float(text))
    assert base._DECODER.float_hook is parse_float
    monkeypatch.setattr(base, "_DECODER", decoder)
    body = base.decode_body(b'{"top_p":1e308,"top_p":1.7e308}', body_type)
    assert numbers == ["1e308", "1.7e308"]
    assert (body["top_p"] if body_type is dict else body.top_p) == 1.7e308


def test_number_that_no_double_represents_is_refused():
    with pytest.raises(GatewayError) as caught:
        base.decode_body(b'{"a":[1e400]}', dict)
    assert caught.value.kind is ErrorKind.invalid_request


async def test_arguments_of_a_tool_have_bounds_of_their_own(codec):
    large = json.dumps({"a": "x" * (1 << 20)}).encode()
    assert (await send(codec, "/v1/tools/add", large))[0] == 413
    many = json.dumps({"a": [0] * 70_000}).encode()
    assert (await send(codec, "/v1/tools/add", many))[0] == 400


async def test_body_in_flight_is_counted_and_given_back_when_the_client_goes(codec):
    async with open_gateway() as gateway:
        key, _ = gateway.open_session(make_session_scope(codec, PoliteEngine(codec)))
        host, port = gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: 1000\r\n\r\n"
        )
        writer.write(head.encode() + b"{")
        while not gateway.usage().bytes_in_flight:
            await asyncio.sleep(0)
        assert gateway.usage().bytes_in_flight == 1000
        writer.close()
        while gateway.usage().bytes_in_flight:
            await asyncio.sleep(0)


async def test_bodies_that_find_no_memory_in_time_are_refused_for_a_retry(codec, monkeypatch):
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(limits.ByteBudget, "take", lambda self, owner, num_bytes: False)
    async with open_gateway() as gateway, aiohttp.ClientSession() as http:
        key, _ = gateway.open_session(make_session_scope(codec, PoliteEngine(codec)))
        body = json.dumps(BODIES[CHAT]).encode()
        async with http.post(gateway.url + CHAT, data=body, headers={"x-api-key": key}) as response:
            assert response.status == 429
            assert response.headers["x-should-retry"] == "true"


async def test_usage_has_what_the_sessions_hold(codec):
    async with open_gateway() as gateway:
        key, agent_session = gateway.open_session(
            make_session_scope(codec, Script(codec, ["Yes."]))
        )
        await (await admit(agent_session, request_of()))
        usage = gateway.usage()
        assert 0 < usage.bytes_held == usage.most_bytes_held < usage.max_bytes_held_per_session
        assert usage.max_bytes_held_per_session <= usage.max_bytes_held
        await gateway.close_session(key)
        assert gateway.usage().bytes_held == 0
