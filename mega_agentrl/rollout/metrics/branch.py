"""Metrics of branching: forks, top-ups, decisions, and the tokens and calls that forks save.

forks_per_prompt, top_ups_per_prompt, decisions_per_prompt
                            mean per tree; a decision is one question to the branch policy
fork_rate                   share of decisions that forked
delta_h                     mean of the probe's entropy minus the baseline over all decisions, nats
                            (with `released` in its own unit); left out without decisions
tokens_saved_fraction       sampled tokens inherited from a parent, as a share of the sampled tokens
                            on all M paths, which M independent rollouts would have sampled
calls_saved_fraction        the same for tool calls
topk_entropy_gap            mean absolute error of the top-k entropy estimate, nats; only if
                            `rollout.branch.entropy_estimate_top_k` is set
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.types.records import RolloutTree, Trajectory


def branch_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """Return the metrics listed above, over all trajectories including failed ones."""
    paths = [trajectory for tree in trees for trajectory in tree.trajectories]
    decisions = [decision for one in paths for decision in one.decisions]
    rises = [decision.delta_h for decision in decisions if decision.delta_h is not None]
    values = {
        "forks_per_prompt": _share(sum(tree.num_forks for tree in trees), len(trees)),
        "top_ups_per_prompt": _share(sum(tree.num_top_ups for tree in trees), len(trees)),
        "decisions_per_prompt": _share(len(decisions), len(trees)),
        "fork_rate": _share(sum(one.num_forks > 0 for one in decisions), len(decisions)),
        "tokens_saved_fraction": _saved_share(
            (sum(one.loss_mask[: one.fork_len]), sum(one.loss_mask)) for one in paths
        ),
        "calls_saved_fraction": _saved_share(_num_inherited_and_total_calls(one) for one in paths),
    }
    if rises:
        values["delta_h"] = sum(rises) / len(rises)
    gaps = [one.topk_entropy_error for one in paths if one.topk_entropy_error is not None]
    if gaps:
        values["topk_entropy_gap"] = sum(gaps) / len(gaps)
    return values


def _num_inherited_and_total_calls(one: Trajectory) -> tuple[int, int]:
    """Return the number of calls inherited from the parent, and of all calls on the path."""
    starts = [turn.start for turn in one.turns if turn.outcome is not None]
    return sum(start < one.fork_len for start in starts), len(starts)


def _saved_share(inherited_and_total: Iterable[tuple[int, int]]) -> float:
    pairs = list(inherited_and_total)
    return _share(sum(inherited for inherited, _ in pairs), sum(total for _, total in pairs))


def _share(part: int, whole: int) -> float:
    """Return `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0
