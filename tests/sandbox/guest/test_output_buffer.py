"""What is kept: exactly the beginning or the end, and the number of bytes left out."""

import fcntl
import os

from hypothesis import example, given
from hypothesis import strategies as st

from mega_agentrl.sandbox.guest.output_buffer import OutputBuffer


def kept_of(chunks, limit, *, keep_end):
    reading, writing = os.pipe()
    buffer = OutputBuffer(reading, limit, keep_end=keep_end)
    for chunk in chunks:
        os.write(writing, chunk)
        assert buffer.drain()
    os.close(writing)
    assert not buffer.drain()
    os.close(reading)
    return buffer


def test_beginning_and_end():
    chunks = [b"abc", b"defg", b"h"]
    begin, end = (kept_of(chunks, 5, keep_end=keep_end) for keep_end in (False, True))
    assert (begin.text(), begin.num_dropped_bytes) == ("abcde", 3)
    assert (end.text(), end.num_dropped_bytes) == ("defgh", 3)


def test_within_the_limit_all_is_kept():
    for keep_end in (False, True):
        buffer = kept_of([b"abc", b"de"], 5, keep_end=keep_end)
        assert (buffer.text(), buffer.num_dropped_bytes) == ("abcde", 0)


@example([b"abc", b"d"], 0, True)
@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(0, 50), st.booleans())
def test_chunks_do_not_matter(chunks, limit, keep_end):
    whole = b"".join(chunks)
    cut = max(0, len(whole) - limit)
    buffer = kept_of(chunks, limit, keep_end=keep_end)
    assert buffer.num_dropped_bytes == cut
    expected = whole[cut:] if keep_end else whole[:limit]
    assert buffer.text() == expected.decode("utf-8", "replace")


def test_a_character_cut_in_two_is_replaced():
    data = "aé".encode()
    assert kept_of([data], 2, keep_end=False).text() == "a�"
    assert kept_of([data], 1, keep_end=True).text() == "�"
    assert kept_of([b"\xff\xfeok"], 9, keep_end=True).text() == "��ok"
    assert kept_of([data[:2], data[2:]], 9, keep_end=True).text() == "aé"  # two reads, one letter


def test_a_drain_is_bounded():
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 18)
    os.write(writing, b"x" * 200_000)
    buffer = OutputBuffer(reading, 1 << 20, keep_end=False)
    assert buffer.drain(num_bytes=1)
    assert len(buffer.text()) == 1 << 16
    assert buffer.drain()
    assert len(buffer.text()) == 200_000
    os.close(reading)
    os.close(writing)


def test_nothing_there_does_not_block():
    reading, writing = os.pipe()
    assert OutputBuffer(reading, 10, keep_end=True).drain()
    os.close(reading)
    os.close(writing)
