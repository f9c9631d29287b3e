"""Frames, settings and the bounded output of the inner program (its calls: `test_pool`)."""

import json
import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.sandbox.interpreter import Settings, _Kept, receive_frame, send_frame


@given(st.text(max_size=200))
def test_frames_carry_any_text(code):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, {"code": code})
        assert receive_frame(theirs) == {"code": code}


def test_large_frame_and_end():
    ours, theirs = socket.socketpair()
    message = {"code": "x" * (1 << 21)}
    sender = threading.Thread(target=lambda: (send_frame(ours, message), ours.close()))
    sender.start()
    with theirs:
        assert receive_frame(theirs) == message
        with pytest.raises(EOFError):
            receive_frame(theirs)
    sender.join()


def test_settings_travel():
    settings = Settings(preload=("math",), memory_mib=7)
    back = Settings(**json.loads(settings.to_json()))
    assert (list(back.preload), back.memory_mib) == (["math"], 7)


@given(st.lists(st.binary(max_size=30), max_size=6), st.integers(1, 40), st.booleans())
def test_kept_output_is_one_end_of_all(parts, limit, keep_end):
    reader, writer = os.pipe()
    kept = _Kept(reader, limit, keep_end=keep_end)
    whole = b"".join(parts)
    for part in parts:
        os.write(writer, part)
        assert kept.drain(num_bytes=1000)
    os.close(writer)
    assert not kept.drain(num_bytes=1000)
    os.close(reader)
    expected = whole[-limit:] if keep_end else whole[:limit]
    assert kept.text() == expected.decode("utf-8", "replace")
    assert kept.num_cut == max(0, len(whole) - limit)
