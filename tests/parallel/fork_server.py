"""Processes for ranks that do not import torch and Megatron again: all are forked from one server.

Not forked from the tests' own process: that has threads.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

LIBRARIES = ["torch", "safetensors.torch", "mega_agentrl.reshard.transport"]
ACTOR = ["mega_agentrl.actor.policy", "mega_agentrl.actor.critic"]
"""Modules that the server imports: 5 s of processor time once, some milliseconds for each fork."""


def fork_server() -> ForkServerContext:
    """The context to start rank processes with; there is one server for all tests of a run.

    On a machine with a GPU the actor is imported by each rank instead: a fork of a process
    that has touched the device cannot use it.
    """
    context = multiprocessing.get_context("forkserver")
    has_gpu = Path("/dev/nvidiactl").exists()
    context.set_forkserver_preload(LIBRARIES if has_gpu else LIBRARIES + ACTOR)
    return context
