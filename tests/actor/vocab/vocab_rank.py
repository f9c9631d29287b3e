"""Runs every check of `vocab_cases` as one of several tensor ranks over gloo.

``python vocab_rank.py KERNEL RANK SIZE PORT`` runs them in a process of its own, where Triton's
interpreter can be chosen; it fails with the check's traceback.
"""

from __future__ import annotations

import os
import sys
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


def check_all(rank_info, kernel):
    """Run every check on this rank and return their names."""
    place = Place(
        VocabKernel(kernel),
        rank=rank_info["rank"],
        size=rank_info["world_size"],
        group=join_gloo(rank_info),
    )
    checks = (*CHECKS, check_exchanges)
    for check in checks:
        check(place)
    return [check.__name__ for check in checks]


def main() -> None:
    kernel, rank, size, port = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    rank_info = {
        "rank": rank,
        "world_size": size,
        "master_address": "127.0.0.1",
        "master_port": port,
    }
    for name in check_all(rank_info | {"timeout_s": 60.0}, kernel):
        sys.stdout.write(f"{name} passed\n")
    sys.stdout.flush()
    # Threads that torch leaves running can abort the process in the interpreter's own exit.
    os._exit(0)


if __name__ == "__main__":
    main()
