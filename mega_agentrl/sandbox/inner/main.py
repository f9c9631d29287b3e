"""Entry of the program inside the wall: warm the interpreter, then serve.

Its one argument is `Settings` as JSON; descriptor 0 is the launcher's channel.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

from mega_agentrl.sandbox.inner.channel import Channel
from mega_agentrl.sandbox.inner.folders import Hands
from mega_agentrl.sandbox.inner.host import Host
from mega_agentrl.sandbox.inner.settings import Settings
from mega_agentrl.sandbox.inner.warm import warm


def main(text: str) -> None:
    """Serve until the launcher closes its channel."""
    settings = Settings.from_json(text)
    if settings.stateful and not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise OSError("kernel without /proc/PID/task/TID/children (CONFIG_PROC_CHILDREN)")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a session holds six
    channel = Channel(socket.socket(fileno=os.dup(0)))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what imports print is no answer
    hands = Hands(settings) if settings.stateful and settings.walled else None
    warm(settings.preload)
    sys.stdout.flush()  # else every call would begin with what imports printed
    Host(settings, channel, hands).serve()
    sys.exit(0)
