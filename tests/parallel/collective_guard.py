"""Jobs that fail at a collective whose communicator does not exist yet.

On a GPU, NCCL creates a communicator in the first collective of a group; gloo connects a group when
it is made. So the methods of torch's process groups are watched instead: after
`init_process_groups`, a group must have had a collective in it. The package itself also uses no
barrier of a group, and nothing over a group of one rank.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import mega_agentrl
from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.parallel import process_groups
from mega_agentrl.actor.policy import PolicyRank
from tests.actor.rank_saves import save_checkpoint
from tests.rank_shards import score, update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch

PACKAGE = str(Path(mega_agentrl.__file__).parent)
METHODS = [
    name
    for name in vars(dist.ProcessGroup)
    if any(part in name for part in ("reduce", "gather", "alltoall", "broadcast", "scatter"))
] + ["barrier", "send", "recv", "recv_anysource"]


class CollectiveGuard:
    """Notes the groups of all collectives until it is closed, and then refuses other groups."""

    def __init__(self) -> None:
        self.names_at_init: set[str] = set()
        self.num_collectives = 0
        self.is_closed = False

    def check(self, method: str, group: Any) -> None:
        if not self.is_closed:
            self.names_at_init.add(group.group_name)
            return
        self.num_collectives += 1
        ranks = dist.get_process_group_ranks(group)
        assert group.group_name in self.names_at_init, f"late communicator of {ranks} in {method}"
        if is_called_by_package():
            assert len(ranks) > 1, f"{method} over one rank"
            assert method != "barrier", "a barrier that is not the store's"


def is_called_by_package() -> bool:
    """Whether the caller of torch is the package rather than Megatron; a mode may lie between."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE) and not path.endswith("_compat.py"):
            return True
        if "megatron" in path:
            return False
        frame = frame.f_back
    return False


_guard: CollectiveGuard | None = None
"""The guard of the running job."""


def _watch(name: str) -> None:
    original = getattr(dist.ProcessGroup, name)

    def call(group: Any, *arguments: Any, **keywords: Any) -> Any:
        if _guard is not None:
            _guard.check(name, group)
        return original(group, *arguments, **keywords)

    setattr(dist.ProcessGroup, name, call)


@contextmanager
def guarded_collectives() -> Iterator[CollectiveGuard]:
    """Guard the collectives of this process.

    The methods stay watched afterwards: a method of a compiled class cannot be put back as it was.
    """
    global _guard
    init = process_groups.init_process_groups
    if not hasattr(dist.ProcessGroup.barrier, "__code__"):
        for name in METHODS:
            _watch(name)

    def init_and_close(*arguments: Any, **keywords: Any) -> Any:
        groups = init(*arguments, **keywords)
        guard.is_closed = True
        return groups

    _guard = guard = CollectiveGuard()
    process_groups.init_process_groups = init_and_close
    try:
        yield guard
    finally:
        process_groups.init_process_groups, _guard = init, None


def run_guarded(
    rank_info: dict[str, Any], config: TrainConfig, batch: TrainBatch, folder: Path
) -> int:
    """Score, update, save, resume and export; return the number of collectives."""
    with guarded_collectives() as guard:
        policy = PolicyRank(config, RankInfo(**rank_info))
        policy.load_hf(config.model.path)
        score(policy, "compute_log_probs", batch)
        update(policy, batch, None, 1e-3)
        save_checkpoint(policy, folder / "saved")
        policy.load_checkpoint(str(folder / "saved"))
        policy.export_hf(str(folder / "exported"))
        policy.close()
    return guard.num_collectives
