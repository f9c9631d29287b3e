"""A function on several ranks: real processes, one gloo group over all of them, one deadline.

    results = run_ranks(work, 2, "argument")     # work(rank, group, "argument") on each

`work` is a function of a module; its results are values that can be pickled, by rank.
"""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.connection
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

DEADLINE_S = 90.0


def run_ranks(work, size, *arguments):
    """Results by rank; the first failure of a rank is raised with its trace, all are ended."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    links, processes = [], []
    for rank in range(size):
        here, there = context.Pipe()
        process = context.Process(
            target=_rank, args=(there, work, rank, size, store.port, arguments), daemon=True
        )
        process.start()
        there.close()
        links.append(here)
        processes.append(process)
    try:
        return _collect(links)
    finally:
        for process in processes:
            process.kill()
            process.join(10.0)


def _collect(links):
    results, ends_at = {}, time.monotonic() + DEADLINE_S
    while len(results) < len(links):
        open_links = [link for rank, link in enumerate(links) if rank not in results]
        ready = multiprocessing.connection.wait(open_links, ends_at - time.monotonic())
        assert ready, f"ranks {sorted(set(range(len(links))) - set(results))} never answered"
        for link in ready:
            failure, result = link.recv()
            assert failure is None, failure
            results[links.index(link)] = torch.load(io.BytesIO(result))
    return [results[rank] for rank in range(len(links))]


def _rank(link, work, rank, size, port, arguments):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port, None, is_master=False),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=30),
        )
        # As bytes: a tensor sent as such is read from the process that made it, which ends here.
        buffer = io.BytesIO()
        torch.save(work(rank, dist.group.WORLD, *arguments), buffer)
        link.send((None, buffer.getvalue()))
    except Exception:  # noqa: BLE001 -- the other process reports it
        link.send((f"rank {rank}: {traceback.format_exc()}", None))
