"""Trees with given entropies, listed per turn and token.

One tool token stands between two turns, unless `touching`. `steady(k)` gives the entropies of a
turn with k windows of entropy 3.
"""

from __future__ import annotations

from array import array

from mega_agentrl.types.records import (
    Role,
    RolloutTree,
    Score,
    StopReason,
    Trajectory,
    Turn,
)
from tests.fakes import make_prompt

TOOL_ENTROPY = 50.0


def steady(num_windows, entropy=3.0):
    return [entropy] * (num_windows + 4)


def path(correct, *turns, touching=False, argmax=None, **changes):
    """Arguments of `tree`: a trajectory, correct or not, None for one without a score."""
    entropies, mask, turn_ids, spans = [], [], [], []
    for index, spoken in enumerate(turns):
        if index and not touching:
            _add(entropies, mask, turn_ids, spans, [TOOL_ENTROPY], 0)
        _add(entropies, mask, turn_ids, spans, spoken, 1)
    score = None
    if correct is not None:
        score = Score(value=float(correct), correct=bool(correct), f1=0.0, answer="", reason="")
    size = len(mask)
    argmax_ids = array("i", [7] * size if argmax is None else argmax)
    return {
        "token_ids": [1] * size,
        "loss_mask": mask,
        "logps": [-1.0] * size,
        "entropies": entropies,
        "versions": [1] * size,
        "turn_ids": turn_ids,
        "turns": spans,
        "stop_reason": StopReason.eos,
        "score": score,
        "argmax_ids": argmax_ids,
        **changes,
    }


def tree(prompt_id, *paths, step=1):
    prompt = make_prompt(prompt_id)
    return RolloutTree(
        prompt=prompt,
        trajectories=[
            Trajectory(
                trajectory_id=f"{prompt_id}/train-{step}/{index}",
                prompt=prompt,
                path=(index,),
                **one,
            )
            for index, one in enumerate(paths)
        ],
    )


def _add(entropies, mask, turn_ids, spans, values, sampled):
    start = len(mask)
    entropies += values
    mask += [sampled] * len(values)
    turn_ids += [len(spans)] * len(values)
    author = Role.assistant if sampled else Role.tool
    spans.append(Turn(index=len(spans), role=author, start=start, stop=len(mask), text="t"))
