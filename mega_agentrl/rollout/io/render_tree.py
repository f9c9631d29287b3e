"""Rollout trees as human-readable text, with each fork drawn at its position.

question set/0: how?
  truth   1
0 agent | think hard<search>q1</search>
  tool  | <result>ok:q1</result>
  asked at token 50 with 3 slots: H 2 over 8 tokens, baseline 1, dH +1, P 0.7 against 0.5: 1 fork
  | 0.0 agent | other words<answer>1</answer>
  |     = reward 0.5, wrong, stop eos, 81 tokens, 1 call, forked at token 50 of 0
  agent | more words<answer>1</answer>
  = reward 1, correct, stop eos, 79 tokens, 1 call

Lines of a fork begin with a bar; the path it was forked from continues behind its last bar.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from mega_agentrl.rollout.io.nodes import format_path
from mega_agentrl.rollout.io.render import question_lines, summary_line, turn_lines
from mega_agentrl.types.records import BranchDecision, RolloutTree, Trajectory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ForksByParent = dict[tuple[int, ...], list[Trajectory]]


def render_tree(tree: RolloutTree) -> str:
    """Render a tree as lines of text, without a trailing newline."""
    forks: ForksByParent = {}
    for one in tree.trajectories:
        if one.parent_id is not None:
            forks.setdefault(one.path[:-1], []).append(one)
    lines = [
        *question_lines(tree.prompt),
        f"  {len(tree.trajectories)} paths: {tree.num_forks} forks, {tree.num_top_ups} top-ups",
    ]
    for one in tree.trajectories:
        if one.parent_id is None:
            lines += _path_lines(one, forks)
    return "\n".join(lines)


def _path_lines(
    one: Trajectory, forks: Mapping[tuple[int, ...], Sequence[Trajectory]]
) -> list[str]:
    """Render the turns of a path that are not inherited, and its forks; the name comes first."""
    children = list(forks.get(one.path, ()))
    decisions = list(one.decisions)
    lines: list[str] = []
    for turn in one.turns:
        if turn.start < one.fork_len:
            continue
        lines += [*_pop_forks_until(turn.start, decisions, children, forks), *turn_lines(turn)]
    lines += _pop_forks_until(len(one.token_ids), decisions, children, forks)
    lines.append(f"= {summary_line(one)}")
    name = format_path(one.path)
    return [f"{name if not i else '':<{len(name)}} {line}" for i, line in enumerate(lines)]


def _pop_forks_until(
    position: int,
    decisions: list[BranchDecision],
    children: list[Trajectory],
    forks: Mapping[tuple[int, ...], Sequence[Trajectory]],
) -> Iterator[str]:
    """Render decisions and forks up to a position and remove them from the lists."""
    while decisions and decisions[0].position <= position:
        yield decision_line(decisions.pop(0))
    while children and children[0].fork_len <= position:
        yield from (f"| {line}" for line in _path_lines(children.pop(0), forks))


def decision_line(decision: BranchDecision) -> str:
    """Render a fork decision on one line."""
    probe, p, tau = decision.probe_entropies, decision.probability, decision.threshold
    measured: list[str] = []
    if decision.delta_h is not None:
        measured.append(f"H {fmean(probe):.3g} over {_pluralize(len(probe), 'token')}")
        measured.append(f"baseline {decision.baseline_entropy:.3g}")
        measured.append(f"dH {decision.delta_h:+.3g}")
    if p is not None:
        measured.append(f"P {p:.3g}" + ("" if tau is None else f" against {tau:.3g}"))
    asked = f"asked at token {decision.position} with {_pluralize(decision.num_slots_left, 'slot')}"
    result = _pluralize(decision.num_forks, "fork") if decision.num_forks else "no fork"
    return ": ".join(part for part in (asked, ", ".join(measured), result) if part)


def _pluralize(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
