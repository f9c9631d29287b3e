"""Rank processes that are forked from one server, so that imports happen once.

Not forked from the tests' own process: that has threads.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

LIBRARIES = ["torch", "safetensors.torch", "mega_agentrl.reshard.session"]
ACTOR = ["mega_agentrl.actor.policy", "mega_agentrl.actor.critic"]
"""Modules that the server imports once (5 s); a fork then takes milliseconds."""


def fork_server() -> ForkServerContext:
    """Return the context to start rank processes with; a test run has one server.

    On a machine with a GPU the actor is imported by each rank instead: a fork of a process
    that has touched the device cannot use it.
    """
    context = multiprocessing.get_context("forkserver")
    has_gpu = Path("/dev/nvidiactl").exists()
    context.set_forkserver_preload(LIBRARIES if has_gpu else LIBRARIES + ACTOR)
    return context
