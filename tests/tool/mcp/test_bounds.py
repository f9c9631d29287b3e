"""Which messages of a server a session sees, and what a process may write."""

import asyncio
import json

import mcp_types
import pytest

from mega_agentrl.tool.mcp import pipes
from mega_agentrl.tool.mcp.bounds import (
    ANSWER_REFUSED,
    MAX_IMAGE_MESSAGE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_OTHER_MESSAGES,
    MAX_SERVER_REQUESTS,
    MessageFilter,
    ServerFloodError,
    size_problem,
)
from mega_agentrl.tool.mcp.pipes import ServerOutputError, read_messages

HELLO = {"protocolVersion": "1", "serverInfo": {"name": "a"}, "instructions": "i" * 100_000}


def message(**fields):
    return mcp_types.jsonrpc_message_adapter.validate_python({"jsonrpc": "2.0", **fields})


def opened_filter():
    opened = MessageFilter()
    opened.filter(message(id=0, result={}))
    return opened


@pytest.mark.parametrize(
    ("content", "max_bytes", "is_read"),
    [
        pytest.param(b"." * MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES, True, id="short"),
        pytest.param(b"a" * (MAX_MESSAGE_BYTES + 1), MAX_MESSAGE_BYTES, False, id="long"),
        pytest.param(b"a" * (MAX_MESSAGE_BYTES + 1), MAX_IMAGE_MESSAGE_BYTES, True, id="image"),
        pytest.param(b"[]," * MAX_MESSAGE_BYTES, MAX_IMAGE_MESSAGE_BYTES, False, id="lists"),
        pytest.param(b"[]," * 110_000, MAX_MESSAGE_BYTES, False, id="many_lists"),
        pytest.param(b"1," * 410_000, MAX_MESSAGE_BYTES, False, id="many_numbers"),
        pytest.param(b"{}," * 90_000, MAX_MESSAGE_BYTES, True, id="objects"),
        pytest.param(
            b"a" * (MAX_IMAGE_MESSAGE_BYTES + 1), MAX_IMAGE_MESSAGE_BYTES, False, id="huge"
        ),
    ],
)
def test_only_images_may_make_a_message_long(content, max_bytes, is_read):
    assert (size_problem(content, max_bytes) == "") is is_read


async def test_requests_are_seen_without_their_parameters_and_notifications_are_not():
    opened = opened_filter()
    request = message(id=1, method="sampling/createMessage", params={"a": "x" * 1_000_000})
    assert opened.filter(request) == message(id=1, method="sampling/createMessage")
    assert opened.filter(message(id="i" * 300, method="ping")) is None
    assert opened.filter(message(id=1, method="m" * 1_000)).method == "m" * 64
    for method in ("notifications/progress", "notifications/message", "notifications/cancelled"):
        assert opened.filter(message(method=method, params={"requestId": 1})) is None


@pytest.mark.parametrize(
    ("flood", "limit"),
    [
        pytest.param({"id": 1, "method": "ping"}, MAX_SERVER_REQUESTS, id="requests"),
        pytest.param({"method": "notifications/message"}, MAX_OTHER_MESSAGES - 1, id="messages"),
        pytest.param({"id": 77, "result": {}}, MAX_OTHER_MESSAGES - 1, id="answers"),
    ],
)
async def test_messages_between_answers_are_bounded(flood, limit):
    opened = opened_filter()
    for _ in range(2):
        for _ in range(limit):
            opened.filter(message(**flood))
        opened.note_answer()
    with pytest.raises(ServerFloodError):
        for _ in range(limit + 20):
            opened.filter(message(**flood))


async def test_a_server_that_writes_now_and_then_goes_on(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0])
    opened = opened_filter()
    for _ in range(3 * MAX_SERVER_REQUESTS):
        now_s[0] += 20
        opened.filter(message(id=1, method="ping"))


async def test_what_a_server_says_of_itself_is_bounded():
    first = MessageFilter().filter(message(id=0, result=dict(HELLO)))
    assert first.result == {key: HELLO[key] for key in ("protocolVersion", "serverInfo")}
    long = HELLO | {"serverInfo": {"name": "a" * 100_000}}
    assert MessageFilter().filter(message(id=0, result=long)).error.code == ANSWER_REFUSED


async def test_tools_are_kept_while_they_are_listed_only():
    opened = opened_filter()
    page = {"tools": [{"name": "a"}], "nextCursor": "1"}
    opened.start_listing()
    assert opened.filter(message(id=1, result=dict(page))).result["tools"] == []
    assert opened.take_listing() == [{"name": "a"}]
    opened.filter(message(id=1, result=dict(page)))
    assert opened.take_listing() == []


def line(padding=0, **fields):
    text = "x" * padding
    return json.dumps({"jsonrpc": "2.0", **fields, "result": {"text": text}}).encode() + b"\n"


async def read(*lines, max_bytes=MAX_MESSAGE_BYTES, on_other_line=lambda: None):
    """Return the messages in an output, and why there are no more."""
    stdout = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
    found = []

    async def feed():
        for one in lines:
            for start in range(0, len(one), 60_000):
                stdout.feed_data(one[start : start + 60_000])
                await asyncio.sleep(0)
        stdout.feed_eof()

    feeding = asyncio.create_task(feed())
    try:
        async for one in read_messages(stdout, max_bytes, on_other_line):
            found.append(one)
    except ServerOutputError as error:
        return found, str(error)
    finally:
        feeding.cancel()


LAST = (
    b'{"result": {"text": "'
    + b"x" * MAX_MESSAGE_BYTES
    + b'", "id": 5}, "jsonrpc": "2.0", "id": 3}\n'
)


@pytest.mark.parametrize(
    "long_line",
    [
        pytest.param(line(MAX_MESSAGE_BYTES, id=3), id="number_first"),
        pytest.param(LAST, id="number_last"),
        pytest.param(
            LAST.replace(b'"jsonrpc": "2.0", "id": 3', b'"id": 3, "jsonrpc": "2.0"'),
            id="number_before_version",
        ),
    ],
)
@pytest.mark.parametrize("times", [1, 20])
async def test_a_message_that_is_too_long_fails_the_call_that_it_answers(long_line, times):
    long_line = long_line.replace(b"xxxx", b"x" * 4 * times, 1)
    found, end = await read(line(id=1), long_line, line(id=4))
    assert [one.id for one in found] == [1, 3, 4]
    assert found[1].error.code == ANSWER_REFUSED
    assert end == "the server has ended"


async def test_a_long_message_is_read_where_images_may_be():
    found, _ = await read(line(3 * MAX_MESSAGE_BYTES, id=3), max_bytes=MAX_IMAGE_MESSAGE_BYTES)
    assert len(found[0].result["text"]) == 3 * MAX_MESSAGE_BYTES
    lists = (
        b'{"jsonrpc": "2.0", "id": 3, "result": {"a": [' + b"[]," * MAX_MESSAGE_BYTES + b"1]}}\n"
    )
    found, _ = await read(lists, line(id=4), max_bytes=MAX_IMAGE_MESSAGE_BYTES)
    assert (found[0].error.code, found[1].id) == (ANSWER_REFUSED, 4)
    huge = line(MAX_IMAGE_MESSAGE_BYTES, id=3)
    found, _ = await read(huge, line(id=4), max_bytes=MAX_IMAGE_MESSAGE_BYTES)
    assert (found[0].error.code, found[1].id) == (ANSWER_REFUSED, 4)


@pytest.mark.parametrize(
    ("long_line", "cause"),
    [
        pytest.param(b"x" * 3_000_000, "more than 1 MiB", id="no_message"),
        pytest.param(b'{"a": "' + b"x" * 3_000_000 + b'"}\n', "more than 1 MiB", id="no_number"),
        pytest.param(b'{"a": "' + b"x" * 9_000_000, "more than 4 MiB", id="no_end"),
    ],
)
async def test_a_long_line_that_answers_nothing_ends_the_session(monkeypatch, long_line, cause):
    monkeypatch.setattr(pipes, "MAX_SKIPPED_BYTES", 4 << 20)
    found, end = await read(line(id=1), long_line, line(id=4))
    assert [one.id for one in found] == [1]
    assert cause in end


async def test_a_long_message_that_is_not_completed_gives_up_its_place(monkeypatch):
    monkeypatch.setattr(pipes, "_LARGE_MESSAGE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(pipes, "_NUM_LARGE_MESSAGES", 1)
    stuck = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
    stuck.feed_data(line(2 * MAX_MESSAGE_BYTES, id=3)[:-10])

    async def read_stuck():
        return [one async for one in read_messages(stuck, MAX_IMAGE_MESSAGE_BYTES, lambda: None)]

    waiting = asyncio.create_task(read_stuck())
    await asyncio.sleep(0)
    found, _ = await read(line(3 * MAX_MESSAGE_BYTES, id=4), max_bytes=MAX_IMAGE_MESSAGE_BYTES)
    assert found[0].id == 4
    with pytest.raises(ServerOutputError):
        await waiting


async def test_lines_that_are_no_messages_are_counted_and_let_others_run():
    num_turns = 0

    async def neighbour():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(neighbour())
    opened = opened_filter()
    with pytest.raises(ServerFloodError):
        await read(b"\n" * 20_000, on_other_line=opened.note_other)
    running.cancel()
    assert num_turns >= MAX_OTHER_MESSAGES
