"""Jobs of the checkpoint tests, run on each rank: a policy trains, saves and resumes."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import torch

from mega_agentrl.actor import checkpoint
from mega_agentrl.actor.checkpoint import AsyncSave
from mega_agentrl.actor.network import Seat
from mega_agentrl.actor.policy import PolicyRank
from mega_agentrl.actor.roll_call import RollCall


def load(policy, folder):
    policy.load(str(folder))


def steps(policy, batch, count, lr=1e-2):
    """Losses of some policy-gradient steps."""
    return [policy.update(batch, None, lr).loss for _ in range(count)]


def save(policy, folder, extra=None):
    return policy.save(str(folder), extra)


def resume(policy, folder):
    """The caller's values, and the steps counted."""
    extra = policy.resume(str(folder))
    return extra, policy.network.num_steps, policy.network.optimizer.num_steps


def random(policy):
    return torch.rand(3)


def scale(policy, factor):
    """Other weights, as if training had gone on."""
    with torch.no_grad():
        for parameter in policy.network.parameters.values():
            parameter.mul_(factor)


def values(policy):
    """Everything that is trained, as (kind, Hugging Face name, rectangle, value)."""
    from mega_agentrl.actor.checkpoint_state import _runs
    from mega_agentrl.actor.flat_shards import hf_views

    return [
        (kind, name, rect, view.clone())
        for kind, _, shard, first, run in _runs(policy.network)
        for name, rect, view in hf_views(shard, run, first)
    ]


def logprobs(policy, batch):
    return policy.logprobs(batch)


def export(policy, folder):
    policy.export(str(folder))


def save_beside_training(policy, folder, batch):
    """Losses of steps taken while the save goes on, which a slow disk makes last."""
    slow_disk(policy, 0.2)
    saving = AsyncSave(policy.network)
    saving.start(folder)
    over = saving.poll()
    losses = steps(policy, batch, 3)
    return over, losses, saving.wait(60.0), saving.poll()


def slow_disk(policy, seconds):
    """Every flush to disk takes longer."""
    flush = os.fsync

    def slow(handle):
        time.sleep(seconds)
        flush(handle)

    os.fsync = slow


def die_in_save(policy, folder, dead_rank, token):
    """One rank is killed while it writes; the others say what they see, once it is long ago."""
    saving = AsyncSave(policy.network)
    death = Path(f"{token}.death")
    checkpoint.RollCall = partial(
        RollCall, clock=lambda: time.monotonic() + (1000.0 if death.exists() else 0.0)
    )
    if torch.distributed.get_rank() == dead_rank:

        def die(handle):
            death.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = die
    saving.start(folder, copy=False)
    try:
        saving.wait(60.0)
    except RuntimeError as error:
        Path(token).write_text(str(error))
    else:
        raise AssertionError(f"the save stands without rank {dead_rank}")


def refused(policy, function, *arguments):
    """The message of the ValueError or RuntimeError."""
    try:
        globals()[function](policy, *arguments)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def call_all(seat, config, calls):
    """Results of the calls: names of this file's functions, with arguments, on a new policy."""
    torch.manual_seed(seat["rank"])
    policy = PolicyRank(config, Seat(**seat))
    try:
        return [globals()[name](policy, *arguments) for name, *arguments in calls]
    finally:
        policy.close()
