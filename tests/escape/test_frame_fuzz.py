"""A fuzzer of the frames between host, supervisors and interpreters, on both sides.

100,000 frames with fixed seeds go through the reader of each table: valid ones, mutated ones and
noise. Then interpreters and hosts of a real guest program send frames at every point at which the
other side reads, beside a session that must not notice.
"""

import gc
import json
import os
import random
import socket
import struct

import pytest

from mega_agentrl.sandbox.guest.channel import CONNECTION_ERRORS, Channel
from mega_agentrl.sandbox.guest.messages import (
    GUEST_EVENTS,
    HOST_ORDERS,
    INTERPRETER_EVENTS,
    INTERPRETER_ORDERS,
    Choice,
    Flag,
    Integer,
    Number,
)
from tests.escape.outside import with_values
from tests.escape.test_neighbours import CHANNEL
from tests.sandbox.guest.guest_program import WAIT_S, ordered, output, program, wait_for

TABLES = {
    "orders of the host": HOST_ORDERS,
    "events of the guest": GUEST_EVENTS,
    "orders to interpreters": INTERPRETER_ORDERS,
    "events of interpreters": INTERPRETER_EVENTS,
}
NUM_FRAMES = 25_000
NUM_SESSIONS = 1000

ODD_VALUES = [
    *(None, True, False, 0, -1, 1, 255, 256, -64, -65, -1000, 4095, 4096, 2**31, 2**63, 10**400),
    *(0.5, -0.0, 1e308, float("inf"), float("nan"), "", "0", "done", "\ud800", "\0", "x" * 300),
    *([], [0], {}, {"code": 0}, [[[[[]]]]]),
]


def valid_value(field, draw):
    match field:
        case Integer(low, high):
            return draw.choice([low, high, draw.randint(low, high)])
        case Number(low, high):
            return draw.choice([low, high, draw.uniform(low, high)])
        case Flag():
            return draw.random() < 0.5
        case Choice(values):
            return draw.choice(values)
    return "".join(draw.choice('aé\n"\\\U0001f600') for _ in range(draw.randint(0, 40)))


def valid_message(table, draw):
    kind = draw.choice([*table.kinds])
    fields = table.kinds[kind]
    return {table.key: kind} | {name: valid_value(field, draw) for name, field in fields.items()}


def mutated_message(table, draw):
    """A valid message with one to three changes, which may cancel each other."""
    message = valid_message(table, draw)
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([*message, "code", "errno", "id", "more"])
        match draw.randrange(4):
            case 0:
                message.pop(name, None)
            case 1:
                message = valid_message(table, draw) | {table.key: message.get(table.key)}
            case _:
                message[name] = draw.choice(ODD_VALUES)
    return message


def noise(table, draw):
    """Bytes that may be a frame, part of one, or more than one."""
    body = bytearray(json.dumps(valid_message(table, draw)).encode())
    for _ in range(draw.randint(1, 6)):
        position = draw.randrange(len(body) + 1)
        match draw.randrange(4):
            case 0:
                body[position : position + 1] = bytes([draw.randrange(256)])
            case 1:
                del body[position : position + draw.randint(1, 5)]
            case 2:
                body[position:position] = draw.choice(
                    [b"[" * 150, b'{"a":' * 60, b"1" * 200, b"1e999", b"NaN", b"\\ud800", b"\0"]
                )
            case _:
                body[position:position] = draw.randbytes(draw.randint(1, 9))
    length = draw.choice([len(body)] * 4 + [0, 1, len(body) - 1, len(body) + 1, 2**31, 2**32 - 1])
    return struct.pack(">I", max(0, length)) + bytes(body)


def framed(message):
    body = json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body


def is_valid(table, message):
    """Read the table without its own check."""
    fields = table.kinds.get(message.get(table.key)) if _is_text(message.get(table.key)) else None
    if fields is None or {*message} != {table.key, *fields}:
        return False
    for name, field in fields.items():
        value = message[name]
        match field:
            case Integer(low, high):
                right = type(value) is int and low <= value <= high
            case Number(low, high):
                right = type(value) in (int, float) and low <= value <= high
            case Flag():
                right = value is True or value is False
            case Choice(values):
                right = _is_text(value) and value in values
            case _:
                right = _is_text(value) and len(value) <= field.max_chars
                if right and field.encodable:
                    right = not any("\ud800" <= letter <= "\udfff" for letter in value)
        if not right:
            return False
    return True


def _is_text(value):
    return isinstance(value, str)


def read_all(channel):
    """What a reader gets, and whether it refused the rest."""
    try:
        return channel.receive_available(), False
    except EOFError:
        return [], False
    except ValueError:
        return [], True


@pytest.mark.slow(10)
@pytest.mark.parametrize("name", TABLES)
def test_what_is_read_is_in_the_table(name):
    table, draw = TABLES[name], random.Random(f"frames {name}")
    gc.collect()  # sockets of earlier tests' sessions
    num_fds = len(os.listdir("/proc/self/fd"))
    num_read = 0
    for number in range(NUM_FRAMES):
        ours, theirs = socket.socketpair()
        channel = Channel(ours, accepts=table, max_bytes=1 << 20)
        with theirs:
            if number % 2:
                message = (valid_message if number % 4 == 1 else mutated_message)(table, draw)
                theirs.send(framed(message))
                read, is_refused = read_all(channel)
                # JSON has one spelling for the integer and the float of some numbers, and no NaN.
                assert is_refused is not is_valid(table, json.loads(json.dumps(message))), message
                assert is_refused or read == [message]
            else:
                theirs.send(noise(table, draw))
                read, _ = read_all(channel)
                assert all(is_valid(table, message) for message in read)
            num_read += len(read)
        channel.close()
    assert num_read > NUM_FRAMES // 4
    assert len(os.listdir("/proc/self/fd")) == num_fds


ATTACK = """
frames = [bytes.fromhex(frame) for frame in frames]
def pour():
    for frame in frames:
        try:
            os.write(channel, frame)
        except OSError:
            pass
def lie(link, settings):
    for fd in link.take_fds(3):
        os.close(fd)
    pour()
    return link
def twist(settings):
    pid = fork_process(settings)
    if pid == 0:
        real = guest._open_channel
        def open_channel(fd):
            global channel
            channel = fd
            pour()
            return real(fd)
        guest._open_channel = open_channel
    return pid
fork_process = guest._fork_process
if where == 0:
    pour()
elif where == 1:
    guest._serve_fork = lie
elif where == 2:
    guest._fork_process = twist
"""


def attack_a_session(stateful, draw):
    """One session whose interpreter and host send frames that they should not."""
    session = stateful.open_session()
    make = draw.choice([noise, lambda *a: framed(mutated_message(*a))])
    frames = [make(INTERPRETER_EVENTS, draw).hex() for _ in range(draw.randint(1, 20))]
    where = draw.randrange(4)
    code = CHANNEL + with_values(ATTACK, frames=frames, where=where)
    try:
        order = {"order": "run", "id": 1, "kind": "default", "code": code, "timeout_s": 5.0}
        session.send(order)
        assert session.receive(timeout_s=WAIT_S)["event"] == "started"
        assert session.receive(timeout_s=WAIT_S)["event"] == "done"
        if where in (1, 2):
            child = ordered(session, "fork")
            assert session.receive(timeout_s=WAIT_S)["event"] in ("forked", "failed")
            child.close()
        if where == 3:
            for _ in range(3):
                session._socket.send(noise(HOST_ORDERS, draw))
            session.shutdown()
    except CONNECTION_ERRORS as error:
        assert not isinstance(error, TimeoutError)
    finally:
        session.close()


@pytest.mark.slow(60)
def test_a_real_guest_survives_and_a_neighbour_does_not_notice():
    draw = random.Random(18)
    with program(stateful=True) as stateful:
        neighbour = stateful.open_session()
        assert output(neighbour, "x = 0; print(x)") == "0"
        num_fds, pids = stateful.num_fds(), stateful.guest_pids()
        for number in range(NUM_SESSIONS):
            attack_a_session(stateful, draw)
            if number % 10 == 0:
                code = f"x += 1; print(x == {number} // 10 + 1)"
                assert output(neighbour, code) == "True"
        wait_for(lambda: stateful.guest_pids() == pids)
        wait_for(lambda: stateful.num_fds() == num_fds)
        neighbour.close()
