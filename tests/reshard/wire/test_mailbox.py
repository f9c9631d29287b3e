"""Messages of two ends in this process, and the form in which they travel."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.wire.local import LocalHub
from mega_agentrl.reshard.wire.mailbox import Kind, Mailbox, Message


def two():
    hub = LocalHub(2)
    return Mailbox(hub.end(0)), Mailbox(hub.end(1))


def test_a_message_survives_the_way():
    message = Message(Kind.frame, 3, 1, 2**40, 2**33, b"\0handle\0")
    assert Message.unpacked(message.packed()) == message
    assert Message.unpacked(Message(Kind.done, 0).packed()) == Message(Kind.done, 0)


def test_a_handle_that_does_not_fit_is_an_error():
    with pytest.raises(RuntimeError, match="5000 bytes, expected at most 4048"):
        Message(Kind.frame, 0, handle=b"x" * 5000).packed()


def test_messages_are_found_by_kind_and_number_in_any_order():
    one, other = two()
    sent = [Message(Kind.frame, 0), Message(Kind.done, 0), Message(Kind.frame, 1)]
    for message in sent:
        one.post(message, 1, 1.0)
    for message in reversed(sent):
        assert other.wait(message.kind, message.number, 0, 1.0) == message


def test_a_message_that_does_not_come_is_an_error_that_names_the_peer():
    one, other = two()
    one.post(Message(Kind.frame, 0), 1, 1.0)
    with pytest.raises(RuntimeError, match="no word from rank 0"):
        other.wait(Kind.done, 0, 0, 0.05)
    assert other.wait(Kind.frame, 0, 0, 0.0).number == 0


def test_close_is_noticed_by_the_peer():
    one, other = two()
    one.close()
    one.close()
    with pytest.raises(RuntimeError, match=r"no word from rank 0: .* has closed"):
        other.wait(Kind.frame, 0, 0, 5.0)
