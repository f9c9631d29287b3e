"""Restore an interrupted run: policy, prompts, engines and metrics as at its last step boundary.

The newest undamaged checkpoint decides; if all are damaged, that of the warm start does. Before the
first RL step the critic is reset, whatever it has learned in this process. The reference of the KL
term is that of the original run: the weights after the warm start, or `model.path` or
`model.reference_path`, which the policy has loaded already.
"""

from __future__ import annotations

import logging
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.actor.checkpoint.checkpoint_dir import unfinished_saves
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.run_dir import CHECKPOINTS_DIR, METRICS_FILE, WARM_START_DIR

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.resume.run_state import RunState
    from mega_agentrl.types.components import Components

_logger = logging.getLogger(__name__)


def restore(components: Components, config: TrainConfig) -> RunState | None:
    """Restore the run and return its state; None if it starts from the beginning.

    Raises:
        ValueError: The weights after the warm start are needed but lost, or the run is
            evaluation-only and has a checkpoint.
    """
    run_dir = Path(config.run_dir)
    folders = run_state.valid_checkpoints(run_dir)
    for folder in unfinished_saves(run_dir / CHECKPOINTS_DIR):
        _logger.warning("checkpoint %s was not finished and is skipped", folder)
    if folders and config.is_eval_only:
        raise ConfigError(
            "run_dir",
            f"{run_dir} with the checkpoint {folders[0].name} of an unfinished run",
            "a folder of its own for an evaluation of model.path (total_steps=0)",
            "an evaluation of that checkpoint was meant: export it (tools/export_hf.py) and give "
            "the folder as model.path",
        )
    has_rl_checkpoint = any(not run_state.is_mid_warm_start(folder) for folder in folders)
    needs_warm_start_reference = config.algo.needs_reference and not config.model.reference_path
    if has_rl_checkpoint and components.make_demonstration_batches and needs_warm_start_reference:
        _restore_reference(components, config, folders)
    loaded = run_state.load_newest_checkpoint(components.policy, folders, components.critic)
    if components.critic is not None and (loaded is None or not loaded[1].step):
        # Its weights are those of lost steps, or of a checkpoint with a damaged policy.
        components.critic.reset()
    if loaded is None:
        # The run was killed before its first checkpoint.
        (run_dir / METRICS_FILE).unlink(missing_ok=True)
        return None
    _, state = loaded
    components.prompt_source.load_state_dict(state.sampler_state)
    # The last step of the warm start is restored, but its log line is written again.
    sft_steps = inf if state.warm_start_progress is None else state.warm_start_progress.step - 1
    run_state.truncate_metrics(
        run_dir,
        state.step,
        has_validation_before=state.validation_before is not None,
        last_validated_step=state.last_validated_step,
        sft_steps=sft_steps,
    )
    components.policy.sync_weights(components.generator, state.weight_version)
    return state


def _restore_reference(components: Components, config: TrainConfig, folders: list[Path]) -> None:
    warm_start_folder = next(
        (folder for folder in folders if folder.parent.name == WARM_START_DIR), None
    )
    if warm_start_folder is None:
        raise ConfigError(
            "run_dir",
            f"{config.run_dir} without a valid checkpoint in {WARM_START_DIR}/",
            "the weights after the warm start there, which are the reference of the KL term, or "
            "resume=false, which moves this run aside and starts a new one",
            "it was removed or is damaged",
        )
    components.policy.load_checkpoint(warm_start_folder)
    components.policy.set_objective(config.algo, config.rollout.temperature)
