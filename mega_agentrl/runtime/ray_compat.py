"""Private names of Ray, and what is changed in it while it starts.

No other module uses or changes what Ray does not publish. Checked with Ray 2.60. Each function says
why it is needed, and after "Until" when it can go. It imports Ray itself, because the driver checks
the layout before any slow import.
"""

from __future__ import annotations

import ctypes
import inspect
import random
import signal
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

START_S = 240.0
"""Maximum time in seconds that Ray's servers on this machine may take to come up."""

_AGENT_PORTS = (
    *("metrics_agent_port", "metrics_export_port"),
    *("runtime_env_agent_port", "dashboard_agent_listen_port"),
)
"""Settings of a raylet: the ports of its agents."""

_PORTS = range(20_000, 32_768)

_SIGACTION_BYTES = 512
"""More than the size of C's `struct sigaction` on any machine."""


@contextmanager
def patient_ray_start() -> Iterator[None]:
    """Let `ray.init` wait `START_S` for the servers that it starts.

    Two limits of Ray are constants. The function that calls `services.get_node` until it succeeds
    gives up after 30 s. The raylet ends if its agents, which are in Python, have not written the
    ports that they have chosen to files within 15 s. Here it is given the ports. Until both limits
    are settings.

    Raises:
        ChildProcessError: The raylet ended.
    """
    from ray._private import services

    get_node, start_raylet = services.get_node, services.start_raylet
    raylets: list[Any] = []

    def start_raylet_with_ports(*args: Any, **settings: Any) -> Any:
        call = inspect.signature(start_raylet).bind(*args, **settings)
        _set_agent_ports(call.arguments)
        started = start_raylet(*call.args, **call.kwargs)
        raylets.append(started.process)
        return started

    def get_node_once_it_is_up(*args: Any, **settings: Any) -> Any:
        ends_at = time.monotonic() + START_S
        while True:
            try:
                return get_node(*args, **settings)
            except RuntimeError:
                if time.monotonic() > ends_at:
                    raise
            for raylet in raylets:
                if raylet.poll() is not None:
                    raise ChildProcessError(f"its raylet ended with exit code {raylet.poll()}.")
            time.sleep(0.1)

    services.get_node, services.start_raylet = get_node_once_it_is_up, start_raylet_with_ports
    try:
        yield
    finally:
        services.get_node, services.start_raylet = get_node, start_raylet


def _set_agent_ports(settings: dict[str, Any]) -> None:
    """Choose the ports of a raylet's agents. Until the raylet can wait longer for their choice."""
    settings |= zip(_AGENT_PORTS, _free_ports(len(_AGENT_PORTS)), strict=True)
    # The raylet reads the last one from a file, which the agent writes otherwise.
    name = f"{_AGENT_PORTS[-1]}_{settings['node_id']}"
    Path(settings["session_dir"], name).write_text(str(settings[_AGENT_PORTS[-1]]))


def _free_ports(count: int) -> list[int]:
    """Return ports that nothing listens at, below those that Linux gives to connections.

    Until no port is chosen here.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Keep this process's handler of SIGTERM while Ray starts.

    Ray's handler in Python ends its servers and exits with code 1, after the shutdown has waited a
    minute for the servers that it ended. Ray's handler in C, which it sets last, aborts. Until
    `ray.init` can be told to set none.
    """
    import ray._private.utils as ray_utils

    libc, action = ctypes.CDLL(None), ctypes.create_string_buffer(_SIGACTION_BYTES)
    libc.sigaction(signal.SIGTERM, None, action)
    set_handler = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = set_handler
        # Python's own function could do this in the main thread only.
        libc.sigaction(signal.SIGTERM, action, None)


def listen_on_loopback_only() -> None:
    """Keep Ray from replacing a loopback address by one that other machines can reach.

    Until `ray.init` takes the address on which a local cluster listens.
    """
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
