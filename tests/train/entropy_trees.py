"""Trees with given entropies, listed per turn and token.

One tool token stands between two turns, unless `touching`. `steady(k)` gives the entropies of a
turn with k windows of entropy 3.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from mega_agentrl.types.records import Role, RolloutTree, Score
from tests.fakes import make_prompt, make_trajectory

TOOL_ENTROPY = 50.0


def steady(num_windows, entropy=3.0):
    return [entropy] * (num_windows + 4)


def path(correct, *turns, touching=False, argmax=None, **changes):
    """A trajectory for `tree`: correct or not, None for one without a score."""
    spans, entropies = [], []
    for index, values in enumerate(turns):
        if index and not touching:
            spans.append((Role.tool, 1))
            entropies.append(TOOL_ENTROPY)
        spans.append((Role.assistant, len(values)))
        entropies += values
    score = None
    if correct is not None:
        score = Score(value=float(correct), correct=bool(correct), f1=0.0, answer="", reason="")
    argmax_ids = array("i", [7] * len(entropies) if argmax is None else argmax)
    values = {"entropies": entropies, "score": score, "argmax_ids": argmax_ids}
    return make_trajectory((0,), spans, **(values | changes))


def tree(prompt_id, *paths, step=1):
    prompt, name = make_prompt(prompt_id), f"{prompt_id}/train-{step}"
    trajectories = [
        replace(one, trajectory_id=f"{name}/{index}", prompt=prompt, path=(index,))
        for index, one in enumerate(paths)
    ]
    return RolloutTree(prompt=prompt, trajectories=trajectories)
