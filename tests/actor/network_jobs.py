"""What the tests of a network run on each rank."""

from __future__ import annotations

import gc
import os
import time

from mega_agentrl.actor.network import Seat
from mega_agentrl.actor.policy import PolicyRank
from mega_agentrl.types import doing
from tests.parallel.policy_jobs import poisoned


def refused_load(seat, config, folder):
    """What loading a model of another shape says."""
    policy = PolicyRank(config, Seat(**seat))
    try:
        policy.load(folder)
    except ValueError as error:
        return str(error)
    return ""


def scheduled_steps(seat, config, batch, spoiled):
    """Stats of three updates under the configured schedule; those in `spoiled` get a NaN."""
    policy = PolicyRank(config, Seat(**seat))
    policy.load(config.model.path)
    stats = []
    for step in range(3):
        with poisoned(policy.network, "dense" if step in spoiled and not seat["rank"] else ""):
            stats.append(policy.update(batch))
    return stats, policy.network.num_steps


class _Noting(dict):
    """The marks of this process, which notes each that is made."""

    def __init__(self, noted):
        super().__init__()
        self._noted = noted

    def __setitem__(self, thread, marks):
        super().__setitem__(thread, marks)
        if (marks[-1].operation, marks[-1].peer) not in self._noted:
            self._noted.append((marks[-1].operation, marks[-1].peer))


def marks_of_a_step(seat, config, batch, folder):
    """Operation and peer of all marks of start, step and export, without their repetitions."""
    noted, before = [], doing._marks
    doing._marks = _Noting(noted)
    try:
        policy = PolicyRank(config, Seat(**seat))
        policy.load(config.model.path)
        policy.supervise(batch, 1e-3)
        policy.export(folder)
    finally:
        doing._marks = before
    return noted


def threads_left_behind(seat, config, batch):
    """Threads of this process with a policy that has taken a step, and after it was closed.

    Beyond those there were before; the groups of a network come with some fifty.
    """
    before = len(os.listdir("/proc/self/task"))
    policy = PolicyRank(config, Seat(**seat))
    policy.load(config.model.path)
    policy.supervise(batch, 1e-3)
    with_policy = len(os.listdir("/proc/self/task")) - before
    policy.close()
    del policy
    gc.collect()
    ends_at = time.monotonic() + 10
    while (left := len(os.listdir("/proc/self/task")) - before) > 0 and time.monotonic() < ends_at:
        time.sleep(0.05)
    return with_policy, left
