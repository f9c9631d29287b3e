"""A real inner program, spoken to by hand over its channel."""

import os
import socket
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from mega_agentrl.sandbox.host_user import take_user
from mega_agentrl.sandbox.inner import processes
from mega_agentrl.sandbox.inner.channel import Channel
from mega_agentrl.sandbox.inner.settings import Settings
from mega_agentrl.sandbox.isolation import open_command, staged, walled_command
from mega_agentrl.sandbox.process import end_child, start_child
from mega_agentrl.sandbox.syscall_filter import encoded_filter

WAIT_S = 60.0


class Program:
    """The program and its main channel. `first`: what it said first."""

    def __init__(self, child, channel, log):
        self.child = child
        self.main = channel
        self.log = log
        self.first = channel.receive(timeout_s=WAIT_S)

    def open(self):
        """A session's channel."""
        channel = ordered(self.main, "open")
        assert self.main.receive(timeout_s=WAIT_S) == {"event": "opened"}
        os.close(self.main.take_fds(1)[0])
        return channel

    def host(self):
        """Process id of the supervisor inside: the parent of all cells."""
        pid = self.child.pid
        while command(pid).split(b"\0")[0].endswith(b"bwrap"):
            (pid,) = processes.children(pid)
        return pid

    def cells(self):
        """Living processes below the supervisor, its helpers included."""
        found = processes._descendants(self.host(), set())
        return {pid for pid in found if processes.state(pid) not in "ZX"}

    def num_fds(self):
        """Descriptors that the supervisor holds."""
        return len(os.listdir(f"/proc/{self.host()}/fd"))

    def said(self):
        """What it wrote to its log."""
        self.log.seek(0)
        return self.log.read().decode()


def command(pid):
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextmanager
def program(**changes):
    """A started one; all of it ends with the block."""
    values = {"walled": True, "stateful": False, "memory_mib": 256} | changes
    encoded = encoded_filter(stateful=values["stateful"]) if values["walled"] else ""
    text = Settings(**({"filter": encoded} | values)).to_json()
    user = take_user() if values["walled"] else None
    line = walled_command(text) if values["walled"] else open_command(text)
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as log:
        with theirs:
            staged_line = staged(line, user=user.number if user else None)
            child = start_child(staged_line, stdin=theirs.fileno(), stderr=log)
        channel = Channel(ours)
        try:
            yield Program(child, channel, log)
        finally:
            channel.close()
            end_child(child)
            if user is not None:
                user.close()


def ordered(channel, order):
    """Order something that takes a channel; our end of it."""
    ours, theirs = socket.socketpair()
    with theirs:
        channel.send({"order": order}, (theirs.fileno(),))
    return Channel(ours)


def forked(channel):
    """A session's fork."""
    child = ordered(channel, "fork")
    answer = channel.receive(timeout_s=WAIT_S)
    assert answer == {"event": "forked"}, answer
    return child


def begin(channel, code, *, number=1, timeout_s=WAIT_S):
    """Send a call and see it start."""
    order = {"order": "run", "id": number, "code": code, "timeout_s": timeout_s}
    channel.send(order)
    assert channel.receive(timeout_s=WAIT_S) == {"event": "started", "id": number}


def done(channel, *, number=1):
    """How the call that was begun went."""
    answer = channel.receive(timeout_s=WAIT_S)
    assert (answer.pop("event"), answer.pop("id")) == ("done", number)
    return answer


def run(channel, code, **more):
    """Both."""
    begin(channel, code, **more)
    return done(channel, **{name: more[name] for name in ("number",) if name in more})


def output(channel, code):
    """What a call that succeeds prints."""
    answer = run(channel, code)
    assert (answer["code"], answer["stderr"]) == (0, ""), answer
    return answer["stdout"].strip()


def wait_for(condition):
    """Until it holds, at most `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
