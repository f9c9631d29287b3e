"""ARES's bootstrap: one pass of rollouts over the training data before the first step.

Each prompt gets `rollout.group_size` trajectories, sampled as in training, with random streams of
their own (stream `bootstrap`). The weights do not change, so the whole pass is one batch: the
threshold is the median over the pass, windows are counted with it, and difficulties and targets
come from a single `ares.update`. The result does not depend on the order of the prompts, the size
of the chunks or interruptions. Alphas keep their initial values (under the released rules, up to
rounding), because they change by the distance from an earlier target. The visit counts for mastery.

Each chunk of `data.prompts_per_step` prompts is written to `bootstrap.bin` in the run folder when
it ends (`entropy_stats_file`); a killed pass continues after the last complete one. The pass waits
for the engine, the tools and the rewards, which have deadlines of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.algo import ares, mastery
from mega_agentrl.algo.mastery import MasteryState
from mega_agentrl.train.ares.entropy_stats import collect_entropy_stats
from mega_agentrl.train.ares.entropy_stats_file import EntropyStatsFile
from mega_agentrl.train.ares.shaping import build_rules, to_ares_stats
from mega_agentrl.train.controllers import Controllers
from mega_agentrl.train.evaluate import sample_trees
from mega_agentrl.types.serialization import from_builtins, to_builtins

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.algo.ares import AresHyperparams
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.components import Components
    from mega_agentrl.types.records import Prompt

BOOTSTRAP_FILE = "bootstrap.bin"
BOOTSTRAP_STREAM = "bootstrap"


def run_bootstrap(
    components: Components,
    config: TrainConfig,
    prompts: Sequence[Prompt],
    controllers: Controllers,
    progress: Callable[[int, int], None] | None = None,
) -> Controllers:
    """Return the controllers with difficulties, targets and the threshold of all prompts.

    Args:
        components: The components of the run.
        config: Settings of the run.
        prompts: The training data, in order.
        controllers: State before the pass.
        progress: Called with the number of finished chunks and of all chunks.

    Raises:
        ValueError: The run folder contains a pass with other settings.
    """
    size = config.data.prompts_per_step
    chunks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    file = EntropyStatsFile(
        components.run_dir / BOOTSTRAP_FILE,
        _settings_fingerprint(components, config, prompts),
        len(chunks),
    )
    if file.result is None:
        for chunk in chunks[file.num_chunks_done :]:
            trees = sample_trees(components, config, chunk, step=BOOTSTRAP_STREAM)
            stats = collect_entropy_stats(
                trees, components.trigger_ids, window=config.algo.ares.window_tokens
            )
            file.append(stats)
            if progress is not None:
                progress(file.num_chunks_done, len(chunks))
        rules = build_rules(config.algo, controllers.kl_coef(config.algo))
        file.finish(to_builtins(compute_bootstrap_state(file, rules)))
    result = from_builtins(Controllers, file.result, str(file.path))
    return replace(controllers, ares=result.ares, mastery=result.mastery)


def compute_bootstrap_state(file: EntropyStatsFile, rules: AresHyperparams) -> Controllers:
    """Return the states of ARES and mastery after all chunks."""
    p95_B = torch.cat(
        [torch.zeros(0), *(chunk_stats.entropy_p95_B for chunk_stats in file.read_chunks())]
    )
    state = ares.update_threshold(ares.AresState(), p95_B, decay=rules.threshold_decay)
    mastery_state, stats = MasteryState(), []
    for chunk_stats in file.read_chunks():
        mastery_state = mastery.update(
            mastery_state,
            chunk_stats.prompt_ids,
            chunk_stats.is_correct_B,
            chunk_stats.mean_entropy_B,
        )
        stats.append(to_ares_stats(chunk_stats, state.threshold))
    if p95_B.numel():
        all_stats = ares.AresStats(
            prompt_ids=tuple(
                prompt_id for chunk_stats in stats for prompt_id in chunk_stats.prompt_ids
            ),
            correct_B=torch.cat([chunk_stats.correct_B for chunk_stats in stats]),
            hwe_B=torch.cat([chunk_stats.hwe_B for chunk_stats in stats]),
            p95_B=p95_B,
        )
        # No KL was measured, so the KL weights remain those of the configuration.
        state = replace(ares.update(state, all_stats, rules), betas=None)
    return Controllers(ares=state, mastery=mastery_state)


def format_bootstrap_summary(controllers: Controllers) -> str:
    """Return one line with the number of prompts and the target of each difficulty."""
    state = controllers.ares
    number = Counter(state.difficulty_by_prompt.values())
    buckets = [
        f"{number[code]} {name}" + ("" if target is None else f" (target {target:.1f} windows)")
        for code, (name, target) in enumerate(
            zip(ares.DIFFICULTY_NAMES, state.targets, strict=True)
        )
    ]
    threshold = "none" if state.threshold is None else f"{state.threshold:.3f} nats"
    return f"bootstrap: {', '.join(buckets)}; threshold {threshold}"


def _settings_fingerprint(
    components: Components, config: TrainConfig, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Return the settings that determine the trajectories and their statistics, by name."""
    words = None if components.trigger_ids is None else _digest(sorted(components.trigger_ids))
    return {
        "seed": config.seed,
        "model.path": config.model.path,
        "engine.max_model_len": config.engine.max_model_len,
        "data.prompts_per_step": config.data.prompts_per_step,
        "data.train": _digest([prompt.prompt_id for prompt in prompts]),
        "algo.ares.mode": str(config.algo.ares.mode),
        "algo.ares.trigger_words_file": words,
        "algo.ares.window_tokens": config.algo.ares.window_tokens,
        **{f"rollout.{name}": value for name, value in asdict(config.rollout).items()},
        **{f"reward.{name}": value for name, value in asdict(config.reward).items()},
    }


def _digest(values: Sequence[str] | Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()[:16]
