"""What branching did: forks, top-ups, decisions, and the tokens that need not be sampled again.

forks, top_ups, decisions   mean per tree; a decision is one question to the branch policy
decisions_forked            share of the decisions that forked
delta_h                     mean entropy rise the decisions saw, nats (under `released` in the
                            unit of its own entropy); left out without any
tokens_saved_share          sampled tokens that a path took over from its parent, of all that
                            its trees' M paths hold: what M independent rollouts would have
                            sampled in addition
calls_saved_share           the same for tool calls
topk_entropy_gap            mean distance of the top-k estimate to the exact entropy, nats; where
                            `rollout.branch.estimate_top_k` asks for it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mega_agentrl.types.records import RolloutTree, Trajectory


def branch_metrics(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """The numbers of the docstring, over all trajectories, failed ones included."""
    paths = [trajectory for tree in trees for trajectory in tree.trajectories]
    decisions = [decision for one in paths for decision in one.decisions]
    rises = [decision.delta_h for decision in decisions if decision.delta_h is not None]
    values = {
        "forks": _share(sum(tree.num_forks for tree in trees), len(trees)),
        "top_ups": _share(sum(tree.num_top_ups for tree in trees), len(trees)),
        "decisions": _share(len(decisions), len(trees)),
        "decisions_forked": _share(sum(one.num_forks > 0 for one in decisions), len(decisions)),
        "tokens_saved_share": _saved(
            (sum(one.loss_mask[: one.fork_len]), sum(one.loss_mask)) for one in paths
        ),
        "calls_saved_share": _saved(_calls(one) for one in paths),
    }
    if rises:
        values["delta_h"] = sum(rises) / len(rises)
    gaps = [one.topk_gap for one in paths if one.topk_gap is not None]
    if gaps:
        values["topk_entropy_gap"] = sum(gaps) / len(gaps)
    return values


def _calls(one: Trajectory) -> tuple[int, int]:
    """Calls it took over from its parent, and all it holds."""
    starts = [turn.start for turn in one.turns if turn.outcome is not None]
    return sum(start < one.fork_len for start in starts), len(starts)


def _saved(taken_and_held: Iterable[tuple[int, int]]) -> float:
    pairs = list(taken_and_held)
    return _share(sum(taken for taken, _ in pairs), sum(held for _, held in pairs))


def _share(part: int, whole: int) -> float:
    """`part` of `whole`, 0 of nothing."""
    return part / whole if whole else 0.0
