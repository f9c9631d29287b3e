"""Messages of two ends in this process, and the form in which they travel."""

from __future__ import annotations

import pytest

from mega_agentrl.reshard.transports.control_channel import (
    ControlChannel,
    ControlMessage,
    MessageType,
)
from mega_agentrl.reshard.transports.in_process import InProcessHub


def two():
    hub = InProcessHub(2)
    return ControlChannel(hub.transport(0)), ControlChannel(hub.transport(1))


def test_a_message_survives_the_way():
    message = ControlMessage(MessageType.frame_ready, 3, 1, 2**40, 2**33, b"\0handle\0")
    assert ControlMessage.unpack(message.pack()) == message
    assert ControlMessage.unpack(
        ControlMessage(MessageType.frame_released, 0).pack()
    ) == ControlMessage(MessageType.frame_released, 0)


def test_a_handle_that_does_not_fit_is_an_error():
    with pytest.raises(RuntimeError, match="5000 bytes, expected at most 4048"):
        ControlMessage(MessageType.frame_ready, 0, handle=b"x" * 5000).pack()


def test_messages_are_found_by_kind_and_number_in_any_order():
    one, other = two()
    sent = [
        ControlMessage(MessageType.frame_ready, 0),
        ControlMessage(MessageType.frame_released, 0),
        ControlMessage(MessageType.frame_ready, 1),
    ]
    for message in sent:
        one.send(message, 1, 1.0)
    for message in reversed(sent):
        assert other.receive(message.message_type, message.frame_index, 0, 1.0) == message


def test_a_message_that_does_not_come_is_an_error_that_names_the_peer():
    one, other = two()
    one.send(ControlMessage(MessageType.frame_ready, 0), 1, 1.0)
    with pytest.raises(RuntimeError, match="no message from rank 0"):
        other.receive(MessageType.frame_released, 0, 0, 0.05)
    assert other.receive(MessageType.frame_ready, 0, 0, 0.0).frame_index == 0


def test_close_is_noticed_by_the_peer():
    one, other = two()
    one.close()
    one.close()
    with pytest.raises(RuntimeError, match=r"no message from rank 0: .* has closed"):
        other.receive(MessageType.frame_ready, 0, 0, 5.0)
