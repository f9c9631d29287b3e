"""Entry point of the guest program: warm the interpreter, then serve.

Its one argument is `GuestSettings` as JSON; descriptor 0 is the channel to the host.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

from mega_agentrl.sandbox.guest.channel import Channel
from mega_agentrl.sandbox.guest.privileged_helper import PrivilegedHelper
from mega_agentrl.sandbox.guest.settings import GuestSettings
from mega_agentrl.sandbox.guest.supervisor import Supervisor
from mega_agentrl.sandbox.guest.warm_up import warm_up_interpreter


def main(settings_json: str) -> None:
    """Serve until the host closes its channel."""
    settings = GuestSettings.from_json(settings_json)
    if settings.stateful and not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise OSError("kernel without /proc/PID/task/TID/children (CONFIG_PROC_CHILDREN)")
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # a session uses six
    channel = Channel(socket.socket(fileno=os.dup(0)))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # output of imports is not part of any reply
    helper = PrivilegedHelper(settings) if settings.stateful and settings.isolated else None
    warm_up_interpreter(settings.preload_modules)
    sys.stdout.flush()  # else every fork would print the output of the imports again
    Supervisor(settings, channel, helper).serve()
    sys.exit(0)
