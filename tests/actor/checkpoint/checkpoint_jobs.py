"""Jobs of the checkpoint tests, run on each rank: a policy trains, saves and resumes."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import torch

from mega_agentrl.actor import megatron_model
from mega_agentrl.actor.checkpoint import save_load
from mega_agentrl.actor.checkpoint.sharded_state import _iter_flat_ranges, iter_hf_views
from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.policy import PolicyRank
from tests.actor.rank_saves import WAIT_S, finish_save, save_checkpoint, start_save
from tests.rank_shards import score, update


def load(policy, folder):
    policy.load_hf(str(folder))


def steps(policy, batch, count, lr=1e-2):
    """Take policy-gradient steps and return their losses."""
    return [update(policy, batch, None, lr).loss for _ in range(count)]


def save(policy, folder, extra=None):
    save_checkpoint(policy, folder, extra)


def save_while_training(policy, folder, batch, count):
    """Save with a writing thread that waits for optimizer steps; return the steps' losses.

    Then save the state after the steps, to `folder` with another name.
    """
    write_rank_file, may_write = save_load.write_rank_file, threading.Event()

    def wait_and_write(*arguments):
        assert may_write.wait(WAIT_S)
        return write_rank_file(*arguments)

    save_load.write_rank_file = wait_and_write
    try:
        started = start_save(policy, folder)
        assert policy.save_result(0.0) is None, "nothing is written yet"
        losses = steps(policy, batch, count)
        may_write.set()
        finish_save(policy, folder, *started)
    finally:
        save_load.write_rank_file = write_rank_file
    save_checkpoint(policy, f"{folder}-later")
    return losses


def resume(policy, folder):
    """Load a checkpoint; return its extra values and both step counts."""
    extra = policy.load_checkpoint(str(folder))
    return extra, policy.megatron_model.num_steps, policy.megatron_model.optimizer.num_steps


def random(policy):
    return torch.rand(3)


def values(policy):
    """Return the training state as (kind, Hugging Face name, rectangle, value)."""
    return [
        (kind, name, rect, view.clone())
        for kind, shard, first, run in _iter_flat_ranges(policy.megatron_model)
        for name, rect, view in iter_hf_views(shard, run, first)
    ]


def logprobs(policy, batch):
    return score(policy, "compute_log_probs", batch)


def export(policy, folder):
    """Export the weights; return the state that is not on the device meanwhile, and afterwards."""
    write, absent = megatron_model.export_hf_folder, []

    def watch(target, model):
        absent.append(model.offloader.on_host)
        write(target, model)

    megatron_model.export_hf_folder = watch
    try:
        policy.export_hf(str(folder))
    finally:
        megatron_model.export_hf_folder = write
    return [*absent, policy.megatron_model.offloader.on_host]


def die_in_save(policy, folder, dead_rank, token):
    """Kill one rank while it writes; rank 0 abandons its save and writes the error to `token`."""
    death = Path(f"{token}.death")
    if torch.distributed.get_rank() == dead_rank:

        def die(handle):
            death.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = die
    partial, _ = start_save(policy, folder)
    while not death.exists():
        time.sleep(0.05)
    assert policy.save_result(0.5) is None, f"the save succeeded without rank {dead_rank}"
    policy.abandon_save()
    try:
        policy.save_result(WAIT_S)
    except RuntimeError as error:
        Path(token).write_text(str(error))
    shutil.rmtree(partial)


def refused(policy, function, *arguments):
    """Return the ValueError or RuntimeError of a job."""
    try:
        globals()[function](policy, *arguments)
    except (ValueError, RuntimeError) as error:
        return error
    return None


def call_all(rank_info, config, calls):
    """Return the results of calls (name of a function of this module, *arguments)."""
    torch.manual_seed(rank_info["rank"])
    policy = PolicyRank(config, RankInfo(**rank_info))
    try:
        return [globals()[name](policy, *arguments) for name, *arguments in calls]
    finally:
        policy.close()
