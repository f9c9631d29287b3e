"""Real processes whose frames are read where they lie."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch

from mega_agentrl.reshard.transports.memory_handles import CudaIpcMemory, MemfdMemory
from mega_agentrl.reshard.transports.shared_memory import (
    ControlChannel,
    ControlMessage,
    MessageType,
    SharedMemoryTransport,
)
from tests.reshard.transports.in_process import InProcessHub
from tests.reshard.transports.ranks import close, ranks, receive, send, wait_frame, wait_sent


def two_channels():
    hub = InProcessHub(2)
    return ControlChannel(hub.transport(0)), ControlChannel(hub.transport(1))


def test_a_handle_that_does_not_fit_is_an_error():
    with pytest.raises(RuntimeError, match="5000 bytes, expected at most 4048"):
        ControlMessage(MessageType.frame_ready, 0, handle=b"x" * 5000).pack()


def test_messages_are_found_by_type_and_index_in_any_order():
    one, other = two_channels()
    sent = [
        ControlMessage(MessageType.frame_ready, 0),
        ControlMessage(MessageType.frame_released, 0),
        ControlMessage(MessageType.frame_ready, 1),
    ]
    for message in sent:
        one.send(message, 1, 60.0)
    for message in reversed(sent):
        assert other.receive(message.message_type, message.frame_index, 0, 60.0) == message


VALUES = [3, 1, 4, 1, 5, 9, 2, 6]
GOOD = [(value, True) for value in VALUES]


def host_transport(store, rank, world_size, timeout_s):
    return SharedMemoryTransport.join(store, rank, world_size, timeout_s, MemfdMemory())


def device_transport(store, rank, world_size, timeout_s):
    memory = CudaIpcMemory(torch.device("cuda", torch.cuda.current_device()))
    return SharedMemoryTransport.join(store, rank, world_size, timeout_s, memory)


def send_one(rank_state, value, peers):
    rank_state.slots[0][:1000].fill_(value)
    rank_state.saved += [
        rank_state.transport.send(rank_state.slots[0][:1000], peer) for peer in peers
    ]


def overwrite(rank_state, value):
    rank_state.slots[0][:1000].fill_(value)


def look(rank_state, peer):
    """Wait for a frame and keep it; the first byte and the number of bytes."""
    rank_state.saved.append(rank_state.transport.receive(rank_state.slots[0], peer))
    frame = rank_state.saved[-1].wait(300)
    return int(frame[0]), len(frame)


def look_again(rank_state):
    return int(rank_state.saved[-1].frame[0])


def release(rank_state):
    rank_state.saved.pop().release()


def send_from_elsewhere(rank_state, values, peer):
    frames = [torch.full((1000 * value,), value, dtype=torch.uint8) for value in values]
    for send_handle in [rank_state.transport.send(frame, peer) for frame in frames]:
        send_handle.wait(300)


def footprint(rank_state):
    """Open descriptors, mappings of frames."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("/memfd:reshard-")
    return len(os.listdir("/proc/self/fd")), mappings


@pytest.fixture(scope="module")
def processes():
    with ranks(4) as group:
        yield group


@pytest.fixture
def group(processes, request):
    """Four ranks with new transports."""
    processes.join(host_transport, request.node.name)
    yield processes
    for rank in range(4):
        processes.ask(rank, close)


def test_frames_come_in_order_whole_and_where_they_lie(group):
    group.start(0, send, VALUES, [1])
    assert group.ask(1, receive, 0, len(VALUES)) == GOOD
    group.finish(0)

    group.ask(0, send_one, 7, [1])
    assert group.ask(1, look, 0) == (7, 1000)
    group.ask(0, overwrite, 8)  # against the rules: shows that there is no copy
    assert group.ask(1, look_again) == 8
    group.ask(1, release)
    assert group.ask(0, wait_sent, 0, 60.0)[0] == ""


def test_two_targets_read_one_frame_and_the_slot_is_free_after_both(group):
    group.start(0, send, VALUES, [1, 2])
    group.start(1, receive, 0, len(VALUES))
    group.start(2, receive, 0, len(VALUES))
    assert [group.finish(1), group.finish(2)] == [GOOD, GOOD]
    group.finish(0)

    group.ask(0, send_one, 5, [1, 2])
    assert [group.ask(1, look, 0), group.ask(2, look, 0)] == [(5, 1000)] * 2
    group.ask(1, release)
    assert group.ask(0, wait_sent, 0, 60.0)[0] == ""
    late, seconds = group.ask(0, wait_sent, 1, 0.5)
    assert "rank 2" in late
    assert seconds > 0.4


def test_frames_are_passed_on_to_two_more_ranks(group):
    group.start(0, send, VALUES, [1])
    group.start(1, receive, 0, len(VALUES), (2, 3))
    for rank in (2, 3):
        group.start(rank, receive, 1, len(VALUES))
    assert [group.finish(rank) for rank in (1, 2, 3)] == [GOOD] * 3
    group.finish(0)


def test_frames_from_outside_the_slots_arrive_and_leave_nothing(group):
    group.start(0, send_from_elsewhere, VALUES, 1)
    assert group.ask(1, receive, 0, len(VALUES)) == GOOD
    group.finish(0)
    assert group.ask(0, footprint)[1] == 1
    assert group.ask(1, footprint)[1] == 1


def test_two_ranks_send_frames_to_each_other_at_once(group):
    group.ask(0, send_one, 3, [1])
    group.ask(1, send_one, 4, [0])
    assert group.ask(0, look, 1) == (4, 1000)
    assert group.ask(1, look, 0) == (3, 1000)
    for rank in (0, 1):
        group.ask(rank, release)
    for rank in (0, 1):
        assert group.ask(rank, wait_sent, 0, 60.0)[0] == ""


@pytest.mark.parametrize(
    ("waits_for", "end"),
    [("frame", "kill"), ("reading", "kill"), ("reading", "close")],
    ids=["frame-killed", "reading-killed", "reading-closed"],
)
def test_a_peer_that_ends_is_noticed_at_once(waits_for, end):
    with ranks(2) as group:
        group.join(host_transport)
        group.start(0, send, [3, 4], [1])
        group.ask(1, receive, 0, 2)
        group.finish(0)
        if waits_for == "frame":
            group.start(0, wait_frame, 1, 100.0)
        else:
            group.ask(0, send_one, 6, [1])
            group.ask(1, look, 0)
            group.start(0, wait_sent, 0, 100.0)
        time.sleep(0.3)
        if end == "kill":
            group.kill(1)
        else:
            group.ask(1, close)
        error, seconds = group.finish(0)
        assert "rank 1" in error
        assert seconds < 90


def test_a_frame_stays_readable_after_its_sender_was_killed():
    with ranks(2) as group:
        group.join(host_transport)
        group.ask(0, send_one, 7, [1])
        assert group.ask(1, look, 0) == (7, 1000)
        group.kill(0)
        assert group.ask(1, look_again) == 7
        group.ask(1, release)
        group.ask(1, close)
        assert group.ask(1, footprint)[1] == 0


def test_a_frame_that_does_not_come_ends_at_the_deadline(group):
    error, seconds = group.ask(0, wait_frame, 1, 0.5)
    assert "rank 1" in error
    assert seconds > 0.4


def test_updates_leave_no_descriptors_and_no_mappings(group):
    found = []
    for number in range(10):
        group.start(0, send, VALUES[:4], [1])
        assert group.ask(1, receive, 0, 4) == GOOD[:4]
        group.finish(0)
        if number in (0, 9):
            found.append([group.ask(rank, footprint) for rank in (0, 1)])
    assert found[0] == found[1]
    # Its own slots, and those of the peer that has sent something.
    assert [mappings for _, mappings in found[1]] == [1, 2]


def test_sessions_leave_no_descriptors_and_no_mappings(processes):
    found = []
    for number in range(4):
        processes.join(host_transport, f"again-{number}")
        processes.start(0, send, VALUES[:4], [1])
        assert processes.ask(1, receive, 0, 4) == GOOD[:4]
        processes.finish(0)
        for rank in range(4):
            processes.ask(rank, close)
        if number in (0, 3):
            found.append([processes.ask(rank, footprint) for rank in (0, 1)])
    assert found[0] == found[1]
    assert [mappings for _, mappings in found[1]] == [0, 0]


def after_close(rank_state):
    """What a frame that is still open makes of it, and new ones."""
    recv_handle = rank_state.saved.pop()
    rank_state.transport.close()
    recv_handle.release()
    errors = []
    for call in (rank_state.transport.send, rank_state.transport.receive):
        try:
            call(rank_state.slots[0], 0)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_a_closed_transport_refuses_frames(group):
    group.ask(0, send_one, 3, [1])
    group.ask(1, look, 0)
    assert group.ask(1, after_close) == ["this rank has closed its end"] * 2


@pytest.mark.gpu
def test_frames_in_device_memory_arrive_and_are_passed_on():
    with ranks(3) as group:
        group.join(device_transport)
        group.start(0, send, VALUES, [1])
        group.start(1, receive, 0, len(VALUES), (2,))
        group.start(2, receive, 1, len(VALUES))
        assert [group.finish(1), group.finish(2)] == [GOOD, GOOD]
        group.finish(0)
