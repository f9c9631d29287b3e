"""Jobs of the tests of `MegatronModel`, run on each rank."""

from __future__ import annotations

import gc
import os
import time

from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.policy import PolicyRank
from mega_agentrl.types import activity
from tests.parallel.policy_jobs import poisoned
from tests.rank_shards import sft_step, update


def refused_load(rank_info, config, folder):
    """Return the error message of loading a model of another shape."""
    policy = PolicyRank(config, RankInfo(**rank_info))
    try:
        policy.load_hf(folder)
    except ValueError as error:
        return str(error)
    return ""


def scheduled_steps(rank_info, config, batch, spoiled):
    """Stats of three updates under the configured schedule; those in `spoiled` get a NaN."""
    policy = PolicyRank(config, RankInfo(**rank_info))
    policy.load_hf(config.model.path)
    stats = []
    for step in range(3):
        with poisoned(
            policy.megatron_model, "dense" if step in spoiled and not rank_info["rank"] else ""
        ):
            stats.append(update(policy, batch))
    return stats, policy.megatron_model.num_steps


class _RecordingDict(dict):
    """Replaces the activities of this process and records every one that starts."""

    def __init__(self, recorded):
        super().__init__()
        self._recorded = recorded

    def __setitem__(self, thread, activities):
        super().__setitem__(thread, activities)
        last = (activities[-1].operation, activities[-1].peer)
        if last not in self._recorded:
            self._recorded.append(last)


def activities_of_a_step(rank_info, config, batch, folder):
    """Return the distinct (operation, peer) of all activities of start, step and export."""
    recorded, before = [], activity._activities
    activity._activities = _RecordingDict(recorded)
    try:
        policy = PolicyRank(config, RankInfo(**rank_info))
        policy.load_hf(config.model.path)
        sft_step(policy, batch, 1e-3)
        policy.export_hf(folder)
    finally:
        activity._activities = before
    return recorded


def threads_left_behind(rank_info, config, batch):
    """Return the threads added by a policy that has taken a step, and those left after closing it.

    The process groups of a model start about fifty threads.
    """
    before = len(os.listdir("/proc/self/task"))
    policy = PolicyRank(config, RankInfo(**rank_info))
    policy.load_hf(config.model.path)
    sft_step(policy, batch, 1e-3)
    with_policy = len(os.listdir("/proc/self/task")) - before
    policy.close()
    del policy
    gc.collect()
    ends_at = time.monotonic() + 120
    while (left := len(os.listdir("/proc/self/task")) - before) > 0 and time.monotonic() < ends_at:
        time.sleep(0.05)
    return with_policy, left
