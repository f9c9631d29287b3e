"""Plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`).

It registers the weight-transfer engine, replaces processors that need torchvision where that is
missing, lets engines on CPUs return the experts of tokens, replaces the layers of engines whose
log-probs shall be exactly the policy's, and kills the process when the process
that hosts the engine ends. Otherwise vLLM's engine core would not notice that its host was killed,
and would hold its memory or GPU forever.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from functools import cache

from mega_agentrl.generator.environment import EXACT_MODEL_VARIABLE, HOST_PID_VARIABLE

WEIGHT_TRANSFER_BACKEND = "mega_reshard"


@cache  # vLLM calls it more than once per process
def register() -> None:
    """Register the plugin."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from mega_agentrl.generator.processors_without_torchvision import replace_torchvision_processors
    from mega_agentrl.generator.vllm_compat import accept_v1_runner

    WeightTransferEngineFactory.register_engine(
        WEIGHT_TRANSFER_BACKEND,
        "mega_agentrl.generator.weights.transfer_engine",
        "ReshardTransferEngine",
    )
    replace_torchvision_processors()
    accept_v1_runner()
    if model_folder := os.environ.get(EXACT_MODEL_VARIABLE):
        from mega_agentrl.generator.exact_layers import use_exact_layers

        use_exact_layers(model_folder)
    host_pid = os.environ.get(HOST_PID_VARIABLE)
    if host_pid is not None and int(host_pid) != os.getpid():
        die_with_process(int(host_pid))


def die_with_process(pid: int) -> None:
    """Kill this process as soon as process `pid` has ended.

    A thread waits on a file descriptor of that process. This needs no polling and, unlike a
    parent-death signal, does not depend on which thread of the parent started this process.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)

    def wait() -> None:
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-host", daemon=True).start()
