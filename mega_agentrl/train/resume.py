"""A run that was cut short goes on: policy, prompts, engines and metrics as at its last pause.

The newest checkpoint whose contents are whole decides; where all are damaged, the warm start's.
Before the first step a critic is as at its start, whatever it learned in this process meanwhile.
The reference of the KL term is what it was: the warm start's weights, or `model.path` or
`model.reference`, which the policy has loaded already.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.train import run_state
from mega_agentrl.train.run_folder import METRICS, START

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.run_state import RunState
    from mega_agentrl.types.parts import Parts


def take_up(parts: Parts, config: TrainConfig) -> RunState | None:
    """The state that the run goes on from, with everything set to it; None: from the beginning.

    Raises `ValueError` where the warm start's weights are needed and lost, or nothing is to be
    trained on from a checkpoint, and what `Policy.resume` raises.
    """
    run_dir = Path(config.run_dir)
    folders = run_state.whole_ones(run_dir)
    if folders and config.validates_only:
        raise ValueError(
            f"total_steps=0: run_dir={run_dir} holds the checkpoint {folders[0].name} of an "
            "unfinished run, expected a folder of its own for an evaluation of model.path; "
            "probable cause: an evaluation of that checkpoint was meant. Export it "
            "(tools/export_hf.py) and give the folder as model.path"
        )
    past = any(not run_state.is_of_warm_start(folder) for folder in folders)
    lost = config.algo.needs_reference and not config.model.reference
    if past and parts.demonstrations and lost:
        _make_reference(parts, config, folders)
    found = run_state.restore_newest(parts.policy, folders, parts.critic)
    if parts.critic is not None and (found is None or not found[1].step):
        # Of steps that are lost with the policy, or of a checkpoint whose other half is damaged.
        parts.critic.reset()
    if found is None:
        # Of a run that was killed before its first checkpoint.
        (run_dir / METRICS).unlink(missing_ok=True)
        return None
    _, state = found
    parts.prompts.load_state_dict(state.sampler)
    # The warm start's last step is there, but for its report.
    sft_steps = inf if state.warm_start is None else state.warm_start["step"] - 1
    run_state.forget_after(
        run_dir,
        state.step,
        evaluated=state.before is not None,
        evaluated_step=state.evaluated_step,
        sft_steps=sft_steps,
    )
    parts.policy.send_weights(parts.generator, state.version)
    return state


def _make_reference(parts: Parts, config: TrainConfig, folders: list[Path]) -> None:
    start = next((folder for folder in folders if folder.parent.name == START), None)
    if start is None:
        raise ValueError(
            f"run_dir={config.run_dir}: got checkpoints without a whole one in {START}/, expected "
            "the warm start's weights there, which are the reference of the KL term; probable "
            "cause: it was removed or is damaged. resume=false keeps this run aside and begins "
            "anew"
        )
    parts.policy.resume(start)
    parts.policy.set_objective(config.algo, config.rollout.temperature)
