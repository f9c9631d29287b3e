"""Runs checks of `vocab_cases` as one of several tensor ranks over gloo.

``python vocab_rank.py KERNEL SIZE PORT CHECK ...`` runs the ranks as forks of a process of its own,
where Triton's interpreter can be chosen; it prints the traceback of a check that fails.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from unittest.mock import patch

import torch
import torch.distributed as dist

from mega_agentrl.actor.vocab.vocab_parallel import VocabKernel, _select_kernel
from tests.actor.gloo_ranks import join_gloo
from tests.actor.vocab.vocab_cases import CHECKS, VOCAB, Place, close, given, reference, run

SCRATCH_BYTES = 4_000


def check_exchanges(place: Place) -> None:
    """One all-gather per forward chunk, one all-reduce backward."""
    values = given(40, VOCAB, 24)
    rows = place.rows(VOCAB)
    step = _select_kernel(values[0], place.vocab_shard(VOCAB)).chunk_tokens(
        values[0], rows.stop - rows.start, SCRATCH_BYTES
    )
    with (
        patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gather,
        patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce,
    ):
        hidden_grad_ND = run(place, *values, scratch_bytes=SCRATCH_BYTES)[2]
    assert gather.call_count == -(-40 // step) > 1, (gather.call_count, step)
    assert reduce.call_count == 1
    close(hidden_grad_ND, reference(*values)[2], 5e-6)


def check_reduce_scatter(place: Place) -> None:
    """Ranks that hold some of the tokens get the bits of the all-reduce for these, 0 for others."""
    for dtype in (torch.float32, torch.bfloat16):
        hidden_ND, *values = given(40, VOCAB, 24, dtype)
        whole_ND = run(place, hidden_ND, *values, scratch_bytes=SCRATCH_BYTES)[2]
        for first in (13, 20, 0):
            rows_of_ranks = (first, 40 - first)
            with patch.object(dist, "all_reduce", side_effect=AssertionError("all-reduce")):
                got_ND = run(
                    place,
                    hidden_ND,
                    *values,
                    scratch_bytes=SCRATCH_BYTES,
                    rows_of_ranks=rows_of_ranks,
                )[2]
            own = slice(0, first) if place.rank == 0 else slice(first, 40)
            expected_ND = torch.zeros_like(whole_ND)
            expected_ND[own] = whole_ND[own]
            assert torch.equal(got_ND, expected_ND), (dtype, first)


RANK_CHECKS = {check.__name__: check for check in (*CHECKS, check_exchanges, check_reduce_scatter)}


def run_checks(rank_info, kernel, names):
    """Run the named checks on this rank and return the names."""
    place = Place(
        VocabKernel(kernel),
        rank=rank_info["rank"],
        size=rank_info["world_size"],
        group=join_gloo(rank_info),
    )
    for name in names:
        RANK_CHECKS[name](place)
    return list(names)


def serve(rank_info, kernel, names):
    """Run the checks as a process of its own."""
    try:
        run_checks(rank_info, kernel, names)
    except BaseException:  # noqa: BLE001 the process ends here
        traceback.print_exc()
        os._exit(1)
    # Threads that torch leaves running can abort the process in the interpreter's own exit.
    os._exit(0)


def main() -> None:
    kernel, size, port, *names = sys.argv[1:]
    torch.set_num_threads(1)
    rank_info = {
        "world_size": int(size),
        "master_address": "127.0.0.1",
        "master_port": int(port),
        "timeout_s": 300.0,
    }
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=serve, args=(rank_info | {"rank": rank}, kernel, names), daemon=True)
        for rank in range(int(size))
    ]
    for rank in ranks:
        rank.start()
    # A rank whose peer has failed gets an error of its connection.
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
