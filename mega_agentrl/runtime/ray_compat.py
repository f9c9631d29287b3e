"""Private names of Ray, and what is changed in it while it starts.

No other module uses or changes what Ray does not publish. Checked with Ray 2.60. Each function says
why it is needed, and after "Until" when it can go. It imports Ray itself, because the driver checks
the layout before any slow import.
"""

from __future__ import annotations

import ctypes
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

START_S = 240.0
"""Maximum time in seconds that Ray's servers on this machine may take to come up."""

_SIGACTION_BYTES = 512
"""More than the size of C's `struct sigaction` on any machine."""


@contextmanager
def patient_ray_start() -> Iterator[None]:
    """Let `ray.init` wait `START_S` for the servers that it starts, instead of 30 s.

    Ray's limit is a constant in the function that calls `services.get_node` until it succeeds.
    Until it is a setting.
    """
    from ray._private import services

    get_node = services.get_node

    def get_node_once_it_is_up(*args: Any, **settings: Any) -> Any:
        ends_at = time.monotonic() + START_S
        while True:
            try:
                return get_node(*args, **settings)
            except RuntimeError:
                if time.monotonic() > ends_at:
                    raise
            time.sleep(0.1)

    services.get_node = get_node_once_it_is_up
    try:
        yield
    finally:
        services.get_node = get_node


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
