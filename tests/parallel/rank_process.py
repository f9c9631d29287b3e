"""One rank of `pool.RankPool`: runs functions until its pool closes the connection."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.parallel.pool import packed, unpacked

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def answer(name: str, rank_info: dict[str, Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """Run one job and return (traceback or '', result)."""
    module, _, function = name.partition(":")
    try:
        result = getattr(importlib.import_module(module), function)(rank_info, *arguments)
    except Exception:  # noqa: BLE001 the pool raises it
        return traceback.format_exc(), None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.use_deterministic_algorithms(False)  # a job of a deterministic run switches it on
        gc.collect()  # networks are cyclic, and each keeps some twenty groups of threads alive
    return "", result


def serve(connection: Connection, log: str) -> None:
    """Answer jobs until the connection ends; all output goes to the file `log`."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # so that the collection after each job leaves the libraries' objects alone
    connection.send_bytes(packed(("", None)))
    while True:
        try:
            job = unpacked(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(packed(answer(*job)))
