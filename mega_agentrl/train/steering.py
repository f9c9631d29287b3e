"""What a step learns from its trajectories, and how the next one is steered.

Between the log-prob pass and the update: ARES shapes rewards, importance weights and advantages
are filled in, KL gets its weights. After it: the controllers move, by what training rollouts
showed and by the KL that the update met. Nothing here waits for anybody; the formulas are in
`algo/`, the steps of each method in `ares`, `advantages` and `controllers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import AresMode, FilterKey, KlPlace
from mega_agentrl.train.advantages import add_advantages, add_corrections
from mega_agentrl.train.ares import (
    AresStep,
    ares_metrics,
    ares_update,
    begin_step,
    kl_weights,
    measured_kl,
    rules_of,
    shape_rewards,
)
from mega_agentrl.train.bootstrap import bootstrap, described
from mega_agentrl.train.controllers import kl_after, loss_kl_weights, start
from mega_agentrl.train.seen import counts, observe

if TYPE_CHECKING:
    import torch

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.collected import Collected
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.train.session import Session
    from mega_agentrl.types.batch import TrainBatch, UpdateStats
    from mega_agentrl.types.parts import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A batch ready for the update. kl_weight_BT: [B, T], None for algo.kl_coef throughout.
    ares: what ARES saw, None without it."""

    batch: TrainBatch
    kl_weight_BT: torch.Tensor | None
    ares: AresStep | None
    metrics: dict[str, float] = field(default_factory=dict)


def first_controllers(parts: Parts, config: TrainConfig, session: Session) -> Controllers:
    """Those of a run's beginning, after the bootstrap pass where one is asked for."""
    controllers = start(config.algo)
    if not config.algo.ares.bootstrap:
        return controllers
    prompts = parts.prompts.prompts
    with session.stage("bootstrap", ceil(len(prompts) / config.data.prompts_per_step)):
        controllers = bootstrap(parts, config, prompts, controllers, session.show_pass)
    session.note(described(controllers))
    return controllers


def leave_out_mastered(parts: Parts, config: TrainConfig, controllers: Controllers) -> None:
    """Let the sampler pass over what is mastered now, where algo.ares.skip_mastered says so."""
    if config.algo.ares.skip_mastered:
        mastery = controllers.mastery
        parts.prompts.leave_out(lambda epoch: mastery.skipped(seed=config.seed, epoch=epoch))


def record_accuracies(parts: Parts, collected: Collected) -> None:
    """Tell the sampler how the prompts of a step went; those without a finished trajectory did
    not go."""
    right: dict[str, list[bool]] = {}
    for tree in collected.seen:
        shown = [one.score.correct for one in tree.trajectories if counts(one) and one.score]
        right.setdefault(tree.prompt.prompt_id, []).extend(shown)
    parts.prompts.record({name: sum(shown) / len(shown) for name, shown in right.items() if shown})


def make_lesson(
    parts: Parts,
    config: TrainConfig,
    controllers: Controllers,
    collected: Collected,
    batch: TrainBatch,
) -> Lesson:
    """Shape, correct and weigh a batch of `collected.trees` with all log-probs and rewards."""
    algo, kl_coef = config.algo, controllers.kl_coef(config.algo)
    ares, kl_weight_BT = None, loss_kl_weights(controllers, algo, batch)
    if algo.ares.mode is not AresMode.off:
        filtered = config.rollout.filter_key is not FilterKey.none
        seen, rules = observe(collected.seen, parts.trigger_ids), rules_of(algo, kl_coef)
        ares = begin_step(seen, controllers.ares, rules, filtered=filtered)
        batch = shape_rewards(batch, collected.trees, ares)
        kl_weight_BT = kl_weights(batch, collected.trees, ares)
    batch, corrected = add_corrections(batch, algo)
    batch, figures = add_advantages(batch, algo, kl_coef=kl_coef, markers=parts.cot_markers)
    return Lesson(batch=batch, kl_weight_BT=kl_weight_BT, ares=ares, metrics=corrected | figures)


def next_controllers(
    parts: Parts,
    config: TrainConfig,
    controllers: Controllers,
    lesson: Lesson,
    collected: Collected,
    stats: UpdateStats,
) -> tuple[Controllers, dict[str, float]]:
    """The controllers after the update, and what to show of them."""
    algo, shown = config.algo, dict[str, float]()
    if algo.ares.skip_mastered:
        shown["data/num_left_out"] = float(parts.prompts.num_left_out)
    in_reward = algo.kl_place is KlPlace.reward
    num_steps = config.optim.num_minibatches - stats.num_skipped
    if controllers.kl is not None and num_steps:
        observed = lesson.metrics["advantage/kl"] if in_reward else stats.metrics["ref_kl"]
        controllers = kl_after(controllers, observed, num_steps)
        shown["kl/coef"] = controllers.kl_coef(algo)
    if lesson.ares is not None:
        kl_B = measured_kl(lesson.batch, collected.trees, lesson.ares, str(algo.kl_kind))
        controllers = ares_update(controllers, lesson.ares, kl_B)
        shown |= ares_metrics(controllers, lesson.ares, kl_B)
    return controllers, shown
