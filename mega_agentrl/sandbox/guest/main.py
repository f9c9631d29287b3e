"""Entry point of the guest program: warm the interpreter, then serve.

Its one argument is `GuestSettings` as JSON; descriptor 0 is the channel to the host.

The warm-up imports modules before the first call and uses each of them once. sympy and pandas
import parts of themselves and fill caches on first use, which otherwise every forked interpreter
would repeat; sympy's calls take 9 instead of 39 ms. The heap is moved to huge pages, because a fork
copies page tables; a plain call then takes a third less CPU time.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.sandbox.guest import syscalls
from mega_agentrl.sandbox.guest.channel import Channel
from mega_agentrl.sandbox.guest.messages import HOST_ORDERS
from mega_agentrl.sandbox.guest.settings import GuestSettings
from mega_agentrl.sandbox.guest.supervisor import Supervisor
from mega_agentrl.sandbox.guest.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Iterable


WARM_UP_CODE = {
    "numpy": "import numpy as np; np.linalg.inv(np.eye(2)); np.random.seed(0)",
    "sympy": (
        "from sympy import *; x = symbols('x'); solve(expand((x - 1) * (x + 5)), x); "
        "simplify(sin(x)**2 + cos(x)**2); integrate(x**3, x); str(factor(x**2 - 1))"
    ),
    "pandas": (
        "import pandas as pd; table = pd.DataFrame({'a': [1, 1], 'b': [1, 2]}); str(table); "
        "table.groupby('a')['b'].sum().to_dict()"
    ),
}


def warm_up_interpreter(modules: Iterable[str]) -> None:
    """Import the modules and run their warm-up code; raises `ImportError`."""
    for name in modules:
        importlib.import_module(name)
        exec(WARM_UP_CODE.get(name, ""), {})
    gc.collect()
    gc.freeze()  # keeps the collector from copying every page in each fork
    syscalls.collapse_to_huge_pages()


def main(settings_json: str) -> None:
    """Serve until the host closes its channel."""
    settings = GuestSettings.from_json(settings_json)
    if settings.stateful and not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        raise OSError("kernel without /proc/PID/task/TID/children (CONFIG_PROC_CHILDREN)")
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # a session uses six
    channel = Channel(socket.socket(fileno=os.dup(0)), accepts=HOST_ORDERS, max_fds=1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # the output of imports goes to the log
    if settings.isolated:
        syscalls.hide_sendmsg()
    warm_up_interpreter(settings.preload_modules)
    sys.stdout.flush()  # else every fork would print the output of the imports again
    if settings.stateful:
        Zygote(settings, channel).serve()
    else:
        Supervisor(settings, channel).serve_main(channel)
    sys.exit(0)
