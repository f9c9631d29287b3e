"""Frames: cut and joined anywhere, with descriptors, from a hostile or slow peer."""

import errno
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.sandbox.guest.channel import Channel
from mega_agentrl.sandbox.guest.messages import FrameError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
MESSAGES = st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), max_size=5)


def framed(body):
    return struct.pack(">I", len(body)) + body


@pytest.fixture
def pair():
    """A raw socket and the channel at its other end."""
    raw, end = socket.socketpair()
    channel = Channel(end, max_bytes=1 << 21, max_fds=8)
    yield raw, channel
    raw.close()
    channel.close()


def is_closed_everywhere(reading_end):
    """Nobody holds the pipe's writing end any more."""
    os.set_blocking(reading_end, False)
    try:
        return os.read(reading_end, 1) == b""
    except BlockingIOError:
        return False


@given(MESSAGES, st.lists(st.integers(1, 40), min_size=1))
def test_frames_arrive_whole_however_they_are_cut(messages, sizes):
    raw, end = socket.socketpair()
    channel = Channel(end)
    data = b"".join(framed(json.dumps(one).encode()) for one in messages)
    got = []
    for number in range(len(data) + 1):
        part, data = data[: sizes[number % len(sizes)]], data[sizes[number % len(sizes)] :]
        raw.send(part)
        got += channel.receive_available()
        if not data:
            break
    assert got == messages
    raw.close()
    channel.close()


def test_a_frame_is_its_length_and_json(pair):
    raw, channel = pair
    channel.send({"a": 1})
    assert raw.recv(100) == b'\x00\x00\x00\x08{"a": 1}'


def test_several_frames_in_one_read_come_one_by_one_and_before_the_end(pair):
    raw, channel = pair
    raw.send(framed(b'{"n": 1}') + framed(b"{}") + framed(b'{"n": 3}'))
    raw.close()
    assert [channel.receive(timeout_s=300) for _ in range(3)] == [{"n": 1}, {}, {"n": 3}]
    with pytest.raises(EOFError):
        channel.receive(timeout_s=300)


def test_descriptors_travel_in_order(pair):
    raw, channel = pair
    pipes = [os.pipe() for _ in range(3)]
    Channel(raw).send({}, tuple(w for _, w in pipes))
    channel.receive(timeout_s=300)
    first = channel.take_fds(1)
    taken = first + channel.take_fds(2)
    for (reading, writing), fd in zip(pipes, taken, strict=True):
        assert not os.get_inheritable(fd)
        os.close(writing)
        os.write(fd, bytes([fd]))
        assert os.read(reading, 10) == bytes([fd])
        os.close(fd)
        assert is_closed_everywhere(reading)
        os.close(reading)


def test_descriptors_nobody_took_are_closed(pair):
    raw, channel = pair
    reading, writing = os.pipe()
    Channel(raw).send({}, (writing,))
    os.close(writing)
    channel.receive(timeout_s=300)
    with pytest.raises(FrameError) as caught:
        channel.take_fds(2)
    assert (caught.value.got, caught.value.expected) == ("1 descriptors", "2")
    assert not is_closed_everywhere(reading)
    channel.close()
    channel.close()
    assert is_closed_everywhere(reading)
    os.close(reading)


@pytest.mark.parametrize("counts", [(9,), (60,), (5, 4), (1,) * 9])
def test_too_many_descriptors_are_closed_and_refused(pair, counts):
    raw, channel = pair
    reading, writing = os.pipe()
    sender = Channel(raw)
    for count in counts:
        sender.send({}, (writing,) * count)
    os.close(writing)
    with pytest.raises(FrameError) as caught:
        for _ in counts:
            channel.receive(timeout_s=300)
    assert caught.value.expected == "at most 8"
    assert is_closed_everywhere(reading)
    os.close(reading)


@pytest.mark.parametrize("credentials", [False, True], ids=["plain", "credentials"])
def test_a_reader_without_room_refuses_every_descriptor(credentials):
    raw, end = socket.socketpair()
    channel = Channel(end, max_fds=1, credentials=credentials)
    reading, writing = os.pipe()
    sender = Channel(raw)
    sender.send({}, (writing,))
    channel.receive(timeout_s=300)
    for fd in channel.take_fds(1):
        os.close(fd)
    channel.refuse_fds()
    sender.send({}, (writing,))
    os.close(writing)
    with pytest.raises(FrameError) as caught:
        channel.receive(timeout_s=300)
    assert caught.value.expected == "at most 0"
    assert is_closed_everywhere(reading)
    os.close(reading)
    raw.close()
    channel.close()


def test_a_peer_that_never_stops_cannot_hold_the_reader():
    raw, end = socket.socketpair()
    channel, stop = Channel(end), threading.Event()
    raw.setblocking(True)
    raw.settimeout(0.5)

    def flood():
        while not stop.is_set():
            try:
                raw.sendall(framed(b"{}") * 1000)
            except TimeoutError:
                return

    writer = threading.Thread(target=flood)
    writer.start()
    try:
        for _ in range(5):
            # 16 reads of 64 KiB, 6 bytes a frame, and what was left by the turn before.
            assert len(channel.receive_available()) <= 17 * (1 << 16) // 6
    finally:
        stop.set()
        writer.join(300)
    assert not writer.is_alive()
    raw.close()
    channel.close()


def test_has_unread_sees_frames_and_parts_of_frames(pair):
    raw, channel = pair
    assert not channel.has_unread()
    raw.send(framed(b'{"n": 1}') + b"\0")
    assert channel.has_unread()
    assert channel.receive(timeout_s=300) == {"n": 1}
    assert channel.has_unread()  # the first byte of the next


def test_the_kernel_says_who_sent():
    raw, end = socket.socketpair()
    channel = Channel(end, max_fds=1, credentials=True)
    code = "import os; os.write(0, b'\\0\\0\\0\\x0d{\"pid\": 1234}')"
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=raw)
    assert channel.receive(timeout_s=300) == {"pid": 1234}
    assert child.wait(300) == 0
    assert channel.peer_pid == child.pid
    Channel(raw).send({}, (0,))  # together with a descriptor
    channel.receive(timeout_s=300)
    assert channel.peer_pid == os.getpid()
    assert len(channel.take_fds(1)) == 1
    channel.expected_pid = child.pid  # which has sent the frame before this one
    Channel(raw).send({})
    with pytest.raises(FrameError) as caught:
        channel.receive(timeout_s=300)
    assert caught.value.got.endswith(f" {os.getpid()}") and caught.value.expected == str(child.pid)
    raw.close()
    channel.close()


NO_OBJECTS = {
    "list": b"[1]",
    "text": b'"x"',
    "null": b"null",
    "half": b'{"a":',
    "nothing": b"",
    "letters": b'{"\xff": 1}',
    "number": b"1" * 5000,
    "lists": b"[" * 200_000,
    "objects": b'{"a":' * 200_000,
}


@pytest.mark.parametrize("body", NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_a_frame_that_is_no_object_is_refused(pair, body):
    raw, channel = pair
    threading.Thread(target=raw.sendall, args=(framed(body),)).start()
    with pytest.raises(ValueError):
        channel.receive(timeout_s=300)


def test_the_bound_is_exact_and_seen_before_the_body(pair):
    raw, channel = pair
    limit = 1 << 21
    fits = {"a": "x" * (limit - 9)}
    threading.Thread(target=raw.sendall, args=(framed(json.dumps(fits).encode()),)).start()
    assert channel.receive(timeout_s=300) == fits
    raw.send(struct.pack(">I", limit + 1))
    with pytest.raises(FrameError) as caught:
        channel.receive(timeout_s=300)
    assert caught.value.expected == f"at most {limit}" and f" {limit + 1} " in caught.value.got


def test_send_nowait_never_blocks_and_flush_goes_on(pair):
    raw, channel = pair
    messages = [{"text": "x" * 500_000}, {"text": "y" * 500_000}, {"n": 3}]
    for one in messages:
        channel.send_nowait(one)
    assert not channel.flush()
    reader, got = Channel(raw), []
    deadline = time.monotonic() + 300
    while not channel.flush() and time.monotonic() < deadline:
        got += reader.receive_available()
    got += reader.receive_available()
    assert got == messages
    assert channel.flush()


def test_waiting_for_a_frame_ends_at_the_deadline(pair):
    raw, channel = pair
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.receive(timeout_s=0.05)
    raw.send(framed(b'{"a": 1}')[:7])
    with pytest.raises(TimeoutError):
        channel.receive(timeout_s=0.05)
    with pytest.raises(TimeoutError):
        channel.send({"text": "x" * 2_000_000}, timeout_s=0.05)
    assert time.monotonic() - begin >= 0.15
    raw.send(framed(b'{"a": 1}')[7:])
    assert channel.receive(timeout_s=300) == {"a": 1}  # a deadline loses nothing


def test_send_waits_for_a_slow_reader(pair):
    raw, channel = pair
    message = {"text": "z" * 1_000_000}
    reader, writing = os.pipe()
    sender = threading.Thread(target=channel.send, args=(message, (writing,)))
    sender.start()
    time.sleep(0.05)
    end = Channel(raw, max_fds=8)
    assert end.receive(timeout_s=300) == message
    sender.join()
    assert len(end.take_fds(1)) == 1
    with pytest.raises(FrameError) as caught:
        end.take_fds(1)
    assert caught.value.got == "0 descriptors", "they are sent once, with the first part"
    os.close(reader)
    os.close(writing)


def test_shutdown_unblocks_both_ends(pair):
    raw, channel = pair
    other = Channel(raw)
    ends = []

    def wait(one):
        with pytest.raises(EOFError):
            one.receive(timeout_s=300)
        ends.append(one)

    threads = [threading.Thread(target=wait, args=(one,)) for one in (channel, other)]
    for thread in threads:
        thread.start()
    channel.shutdown()
    for thread in threads:
        thread.join(300)
    assert set(ends) == {channel, other}
    with pytest.raises(BrokenPipeError):
        other.send({})
    channel.close()
    with pytest.raises(OSError) as caught:
        channel.shutdown()
    assert caught.value.errno == errno.EBADF
