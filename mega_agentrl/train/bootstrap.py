"""ARES's bootstrap: one pass of rollouts over the training data before the first step.

Each prompt gets `rollout.num_trajectories` trajectories, sampled as in training, with random
streams of their own (step `bootstrap`). The weights stay as they are, so all of it is one batch:
the threshold is the median over the whole pass, windows are counted by it, and difficulties and
targets come from a single `ares.update`. The order of the prompts, the size of the chunks and
where the pass was interrupted make no difference. Alphas stay at their start (with the released
rules they move by what rounding leaves), as they move by the distance from a target that was
there before; the visit counts for mastery.

Chunks of `data.prompts_per_step` prompts are on disk as each one ends, in `bootstrap.jsonl` of
the run folder (see `seen_file`); a pass that was killed goes on behind the last whole one. Waits
for engine, tools and rewards, which have deadlines of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.algo import ares, mastery
from mega_agentrl.algo.mastery import Mastery
from mega_agentrl.rollout.collector import collect
from mega_agentrl.train.ares import rules_of, stats_of
from mega_agentrl.train.rewards import add_model_scores
from mega_agentrl.train.seen import observe
from mega_agentrl.train.seen_file import SeenFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.algo.ares import AresRules
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.types.parts import Parts
    from mega_agentrl.types.records import Prompt, RolloutTree

FILE = "bootstrap.jsonl"
STEP = "bootstrap"


def bootstrap(
    parts: Parts,
    config: TrainConfig,
    prompts: Sequence[Prompt],
    controllers: Controllers,
    progress: Callable[[int, int], None] | None = None,
) -> Controllers:
    """The controllers with difficulties, targets and threshold of all prompts.

    prompts: the training data, in order. progress: told the number of chunks that are done and
    of all. Raises `ValueError` where the run folder holds a pass of other settings.
    """
    size = config.data.prompts_per_step
    chunks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    file = SeenFile(parts.run_dir / FILE, _settings(parts, config, prompts), len(chunks))
    if file.result is None:
        for chunk in chunks[file.num_done :]:
            trees = _roll_out(parts, config, chunk)
            file.append(observe(trees, parts.trigger_ids))
            if progress is not None:
                progress(file.num_done, len(chunks))
        rules = rules_of(config.algo, controllers.kl_coef(config.algo))
        file.finish(conclude(file, rules))
    assert file.result is not None
    return replace(
        controllers,
        ares=ares.AresState.from_plain(file.result["ares"]),
        mastery=Mastery.from_plain(file.result["mastery"]),
    )


def conclude(file: SeenFile, rules: AresRules) -> dict[str, Any]:
    """What all chunks together say, as plain values: the states of ARES and of mastery."""
    p95_B = torch.cat([torch.zeros(0), *(seen.p95_B for seen in file.chunks())])
    state = ares.update_threshold(ares.AresState(), p95_B, decay=rules.threshold_decay)
    visited, stats = Mastery(), []
    for seen in file.chunks():
        visited = mastery.update(visited, seen.prompt_ids, seen.correct_B, seen.entropy_B)
        stats.append(stats_of(seen, state.threshold))
    if p95_B.numel():
        everything = ares.AresStats(
            prompt_ids=tuple(name for one in stats for name in one.prompt_ids),
            correct_B=torch.cat([one.correct_B for one in stats]),
            hwe_B=torch.cat([one.hwe_B for one in stats]),
            p95_B=p95_B,
        )
        # No KL was measured: its weights stay those of the configuration, whatever that says later.
        state = replace(ares.update(state, everything, rules), betas=None)
    return {"ares": state.to_plain(), "mastery": visited.to_plain()}


def described(controllers: Controllers) -> str:
    """A line for people: how many prompts of each difficulty, with targets and threshold."""
    state = controllers.ares
    number = Counter(state.difficulty.values())
    buckets = [
        f"{number[code]} {name}" + ("" if target is None else f" (target {target:.1f} windows)")
        for code, (name, target) in enumerate(zip(ares.NAMES, state.targets, strict=True))
    ]
    threshold = "none" if state.threshold is None else f"{state.threshold:.3f} nats"
    return f"bootstrap: {', '.join(buckets)}; threshold {threshold}"


def _roll_out(parts: Parts, config: TrainConfig, prompts: Sequence[Prompt]) -> list[RolloutTree]:
    trees = parts.wait(
        collect(
            prompts,
            generator=parts.generator,
            tools=parts.tools,
            codec=parts.codec,
            interactions=parts.interactions,
            rubric=parts.rubric,
            config=config.rollout,
            max_model_len=config.engine.max_model_len,
            seed=config.seed,
            step=STEP,
            spans=parts.watch.spans,
        )
    )
    add_model_scores(parts, trees)
    return trees


def _settings(parts: Parts, config: TrainConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What decides on the trajectories and on what is read off them, by name."""
    words = None if parts.trigger_ids is None else _digest(sorted(parts.trigger_ids))
    return {
        "seed": config.seed,
        "model.path": config.model.path,
        "engine.max_model_len": config.engine.max_model_len,
        "data.prompts_per_step": config.data.prompts_per_step,
        "data.train": _digest([prompt.prompt_id for prompt in prompts]),
        "algo.ares.mode": str(config.algo.ares.mode),
        "algo.ares.words": words,
        **{f"rollout.{name}": value for name, value in asdict(config.rollout).items()},
        **{f"reward.{name}": value for name, value in asdict(config.reward).items()},
    }


def _digest(values: Sequence[str] | Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()[:16]
