"""One rank of `pool.RankPool`: runs the functions it is sent until its pool hangs up.

``python rank_process.py DESCRIPTOR``, of the pool's pipe, which it inherits.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.parallel.pool import packed, unpacked


def answer(name: str, seat: dict[str, Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """(traceback or nothing, result) of one job."""
    module, _, function = name.partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(seat, *arguments)
    except Exception:  # noqa: BLE001 the pool raises it
        return traceback.format_exc(), None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # networks are cyclic, and each keeps some twenty groups of threads alive
    return "", result


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    with Connection(int(sys.argv[1])) as connection:
        connection.send_bytes(packed(("", None)))
        while True:
            try:
                job = unpacked(connection.recv_bytes())
            except EOFError:
                return
            connection.send_bytes(packed(answer(*job)))


if __name__ == "__main__":
    main()
