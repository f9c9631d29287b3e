"""A run of fakes that can be interrupted at each call, and started again in the same folder.

All samples, scores and updates depend on the seed, the served weight and the reference, so a run
that is restored wrongly ends in other numbers. `Killed` loses everything in memory, as `kill -9`
does; only the folder remains.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from mega_agentrl.actor.checkpoint import checkpoint_dir as checkpoint_folder
from mega_agentrl.config.enums import AresMode
from mega_agentrl.config.sections.algo import AlgoConfig, AresConfig
from mega_agentrl.config.sections.policy import SftConfig
from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.data.sft_dataset import Demonstration, DemonstrationSampler
from mega_agentrl.runtime.event_loop_thread import EventLoopThread
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.signals import SignalHandler
from mega_agentrl.train.trainer import train_with_restarts
from mega_agentrl.types.batch import UpdateStats
from mega_agentrl.types.components import Components
from mega_agentrl.types.serialization import to_builtins
from tests.fakes import CharCodec, FakeGenerator, FakeRubric, FakeTools, make_prompt, random_text
from tests.train.file_policy import WEIGHT, FilePolicy
from tests.train.metric_lines import metric_lines
from tests.train_batches import update_scores

STEPS = 3
_commit_folder = checkpoint_folder.commit_folder


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Moments:
    """The moments of a run by name; `act` is called at the chosen one.

    chosen: a number among all, from 0, or a name and a number among those of it, from 1.
    """

    should_save: int | tuple[str, int] | None = None
    act: Callable[[], None] = lambda: None
    names: list[str] = field(default_factory=list)

    def pass_by(self, name):
        self.names.append(name)
        if self.should_save in (len(self.names) - 1, (name, self.names.count(name))):
            self.act()


def die():
    raise Killed


class LearningGenerator(FakeGenerator):
    """What it writes depends on the weight it serves."""

    weight = None

    def __init__(self, moments):
        super().__init__(write=self._generate_turn, version=0)
        self._moments = moments

    def _generate_turn(self, response, request):
        assert self.weight is not None, "nothing is served yet"
        seed = zlib.crc32(repr((request.seed, self.weight)).encode())
        return random_text(response, replace(request, seed=seed))

    async def generate(self, request):
        self._moments.pass_by("generate")
        await asyncio.sleep(0)
        return await super().generate(request)


class LearningPolicy(FilePolicy):
    """One number that every update moves by what it saw, and a frozen copy of it."""

    def __init__(self, moments):
        super().__init__(0.5)
        self.reference = self.weight
        self._moments = moments
        self.num_restarts = 0

    def compute_log_probs(self, batch):
        self._moments.pass_by("compute_log_probs")
        logp_BT = batch.rollout_logp_BT
        return batch.with_fields(
            old_logp_BT=logp_BT + self.weight / 100,
            ref_logp_BT=logp_BT + self.reference / 100,
            entropy_BT=batch.rollout_entropy_BT,
        )

    def update(self, batch, kl_weight_BT=None, has_signal_B=None):
        self._moments.pass_by("update")
        self.weight += float((batch.reward_B + batch.advantage_BT.abs().sum(1)).mean())
        if kl_weight_BT is not None:
            self.weight += float(kl_weight_BT.mean())
        self._moments.pass_by("updated")
        prompts = float(zlib.crc32(repr(batch.prompt_ids).encode()))
        gap = abs(self.weight - self.reference)
        stats = self._stats(batch, {"ref_kl": gap, "prompts": prompts})
        return replace(stats, scores=update_scores(batch, self.weight / 100))

    def sft_step(self, batch):
        self._moments.pass_by("sft_step")
        self.weight += int(batch.response_BT.sum()) / 1000
        return self._stats(batch, {})

    def _stats(self, batch, metrics):
        return UpdateStats(
            loss=self.weight,
            grad_norm=1.0,
            learning_rate=0.1,
            num_tokens=int(batch.mask_BT.sum()),
            num_skipped_steps=0,
            metrics=metrics,
        )

    def reset_optimizer(self):
        self._moments.pass_by("reset_optimizer")
        self.reference = self.weight

    def set_objective(self, algo, temperature):
        self.reference = self.weight

    def sync_weights(self, generator, version):
        self._moments.pass_by("sync")
        generator.version, generator.weight = version, self.weight
        self._moments.pass_by("synced")
        return {"bytes": 4.0}

    def start_save(self, folder):
        """Copy the weight; the file is written when the run waits, or at the second look."""
        self._moments.pass_by("save")
        self._copied_weight, self._num_looks = self.weight, 0
        manifest = super().start_save(folder)
        (folder / WEIGHT).unlink()
        self._moments.pass_by("saving")
        return manifest

    def save_result(self, wait_s):
        self._num_looks += 1
        if not wait_s and self._num_looks < 2:
            return None
        (self._save_folder / WEIGHT).write_text(json.dumps(self._copied_weight))
        self._moments.pass_by("written")
        return super().save_result(wait_s)

    def load_checkpoint(self, folder):
        self._moments.pass_by("load_checkpoint")
        return super().load_checkpoint(folder)

    def export_hf(self, folder):
        self._moments.pass_by("export_hf")

    def restart(self):
        self.num_restarts += 1
        self._moments.pass_by("restart")
        self.weight = self.reference = 0.5


class LearningCritic(FilePolicy):
    """One number, the value of every token; an update moves it by the returns."""

    def __init__(self, moments):
        super().__init__(0.25)
        self._moments = moments
        self.num_restarts = 0

    def compute_values(self, batch):
        return batch.with_fields(value_BT=torch.full(batch.response_BT.shape, self.weight))

    def update(self, batch):
        self._moments.pass_by("critic")
        self.weight += float(batch.return_BT[batch.mask_BT].mean())
        named = ("value_loss", "value_clipfrac", "value", "return", "explained_variance")
        return UpdateStats(
            loss=self.weight,
            grad_norm=1.0,
            learning_rate=0.1,
            num_tokens=int(batch.mask_BT.sum()),
            num_skipped_steps=0,
            metrics=dict.fromkeys(named, self.weight),
        )

    def save_result(self, wait_s):
        self._moments.pass_by("critic saved")
        return super().save_result(wait_s)

    def reset(self):
        self.weight = 0.25

    def restart_if_lost(self):
        self.num_restarts += 1
        self.weight = 0.25


def interruptible_config(
    base, folder, *, warm, ares, critic=False, save_every=2, every=2, staleness=0
):
    """warm: a warm start comes first. ares: it steers, after a bootstrap; else the adaptive KL."""
    steered = AlgoConfig(
        kl_coef=0.01, ares=AresConfig(mode=AresMode.paper, bootstrap=True, skip_mastered=True)
    )
    plain = AlgoConfig(
        advantage="gae" if critic else "grpo",
        kl_coef=0.01,
        kl_target=0.05,
    )
    return replace(
        base,
        run_dir=str(folder),
        total_steps=STEPS,
        save_every_steps=save_every,
        evaluate=replace(base.evaluate, every_steps=every),
        rollout=replace(base.rollout, max_staleness=staleness),
        algo=steered if ares else plain,
        optim=replace(base.optim, critic_warmup_steps=int(critic)),
        sft=SftConfig(max_steps=2 if warm else 0, batch_size=2, target_success_rate=1.0),
    )


def start(config, moments, signal_handler=None):
    """One process: everything new but the folder. Returns its policy and its prompts."""
    prompts = [make_prompt(f"p{i}", f"Q{i}") for i in range(7)]
    demonstrations = [Demonstration((1, 2), (3, 4), (1, 1)), Demonstration((1,), (5,), (1,))]
    with EventLoopThread() if config.rollout.max_staleness else asyncio.Runner() as runner:
        components = Components(
            run_dir=Path(config.run_dir),
            policy=LearningPolicy(moments),
            generator=LearningGenerator(moments),
            tools=FakeTools(),
            codec=CharCodec(),
            rubric=FakeRubric(),
            prompt_source=PromptSampler(prompts, config.seed),
            validation_prompts=prompts[:2],
            dev_prompts=prompts[:2],
            make_demonstration_batches=(lambda: DemonstrationSampler(demonstrations, 1).next_batch)
            if config.sft.max_steps
            else None,
            startup_s=1.0,
            run_coroutine=runner.run,
            critic=LearningCritic(moments) if config.algo.needs_critic else None,
        )
        with mock.patch.object(checkpoint_folder, "commit_folder", partial(_commit, moments)):
            train_with_restarts(components, config, signal_handler or SignalHandler())
        assert all(session.released == 1 for session in components.tools.sessions)
    return components


def _commit(moments, partial_folder, folder, manifest):
    moments.pass_by("commit")
    _commit_folder(partial_folder, folder, manifest)
    moments.pass_by("saved")


def outcome(config, components):
    """All that a run leaves but for times, and what it had done before: the same for each way."""
    folder = Path(config.run_dir)
    newest = run_state.valid_checkpoints(folder)[0]
    state = to_builtins(run_state.read_run_state(newest))
    for key in ("stage_s", "unwritten_line"):
        del state["logger_state"][key]
    for plain in (state["validation_before"]["sampled"]["metrics"], state):
        _drop_times(plain)
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("stage_seconds", "train_seconds"):
        del summary[key]
    for key in ("before", "after"):
        _drop_times(summary[key])
    lines = metric_lines(folder)
    for line in lines:
        _drop_times(line)
    return {
        "lines": lines,
        "summary": summary,
        "state": state,
        "weight": components.policy.weight,
        "critic": components.critic and components.critic.weight,
        "reference": components.policy.reference,
        "served": (components.generator.version, components.generator.weight),
    }


def _drop_times(values):
    reused = "rollout/num_groups_restored"
    for name in [name for name in values if "time/" in name or "_s" in name[-4:] or name == reused]:
        del values[name]
