"""A real guest program, driven by hand over its channel."""

import os
import socket
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from mega_agentrl.sandbox.guest import processes
from mega_agentrl.sandbox.guest.channel import Channel
from mega_agentrl.sandbox.guest.messages import GUEST_EVENTS
from mega_agentrl.sandbox.guest.settings import GuestSettings
from mega_agentrl.sandbox.isolation import isolated_command, pre_exec_command, unisolated_command
from mega_agentrl.sandbox.process import kill_child, start_child
from mega_agentrl.sandbox.syscall_filter import seccomp_filter_base64
from mega_agentrl.sandbox.uid_lease import lease_uid

WAIT_S = 120.0


class Program:
    """The program and its main channel. `first`: its first event."""

    def __init__(self, child, channel, log):
        self.child = child
        self.main = channel
        self.log = log
        self.first = channel.receive(timeout_s=WAIT_S)

    def open_session(self):
        """A session's channel; its supervisor may start interpreters."""
        channel = ordered(self.main, "open")
        assert self.main.receive(timeout_s=WAIT_S) == {"event": "opened"}
        os.close(self.main.take_fds(1)[0])
        channel.send({"order": "prepare"})
        return channel

    def warm_pid(self):
        """Host process id of the warm program: the zygote, or the supervisor if stateless."""
        pid = self.child.pid
        while command(pid).split(b"\0")[0].endswith(b"bwrap"):
            (pid,) = processes.child_pids(pid)
        return pid

    def guest_pids(self):
        """Live processes below the warm program: supervisors and interpreters."""
        found = processes._descendants(self.warm_pid(), set())
        return {pid for pid in found if processes.process_state(pid) not in "ZX"}

    def num_fds(self):
        """Descriptors that the warm program holds."""
        return len(os.listdir(f"/proc/{self.warm_pid()}/fd"))

    def log_text(self):
        """The text of its log."""
        self.log.seek(0)
        return self.log.read().decode()


def command(pid):
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextmanager
def program(**changes):
    """A started guest program, which ends with the block."""
    values = {"isolated": True, "stateful": False, "memory_mib": 256} | changes
    encoded = seccomp_filter_base64(stateful=values["stateful"]) if values["isolated"] else ""
    text = GuestSettings(**({"seccomp_filter": encoded} | values)).to_json()
    user = lease_uid() if values["isolated"] else None
    guest_command = isolated_command(text) if values["isolated"] else unisolated_command(text)
    host_end, guest_end = socket.socketpair()
    with tempfile.TemporaryFile() as log:
        with guest_end:
            command_line = pre_exec_command(guest_command, user=user.uid if user else None)
            child = start_child(command_line, stdin=guest_end.fileno(), stderr=log)
        channel = Channel(host_end, accepts=GUEST_EVENTS, max_fds=1)
        try:
            yield Program(child, channel, log)
        finally:
            channel.close()
            kill_child(child)
            if user is not None:
                user.close()


def ordered(channel, order):
    """Send an order that passes a channel; return our end of it."""
    host_end, guest_end = socket.socketpair()
    with guest_end:
        channel.send({"order": order}, (guest_end.fileno(),))
    return Channel(host_end, accepts=GUEST_EVENTS)


def forked(channel):
    """A session's fork."""
    child = ordered(channel, "fork")
    answer = channel.receive(timeout_s=WAIT_S)
    assert answer == {"event": "forked"}, answer
    return child


def begin(channel, code, *, number=1, timeout_s=WAIT_S):
    """Send a call and wait until it starts."""
    order = {"id": number, "kind": "default", "code": code, "timeout_s": timeout_s}
    channel.send({"order": "run"} | order)
    assert channel.receive(timeout_s=WAIT_S) == {"event": "started", "id": number}


def done(channel, *, number=1):
    """The `done` event of the call."""
    answer = channel.receive(timeout_s=WAIT_S)
    assert (answer.pop("event"), answer.pop("id")) == ("done", number)
    return answer


def run(channel, code, **more):
    """`begin` and `done`."""
    begin(channel, code, **more)
    return done(channel, **{name: more[name] for name in ("number",) if name in more})


def output(channel, code):
    """What a call that succeeds prints."""
    answer = run(channel, code)
    assert (answer["code"], answer["stderr"]) == (0, ""), answer
    return answer["stdout"].strip()


def wait_for(condition):
    """Wait until `condition()` holds, at most `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
