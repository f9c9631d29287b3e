"""A rollout tree as text for people: branches are drawn where they were made.

question set/0: how?
  truth   1
0 agent | think hard<search>q1</search>
  tool  | <result>ok:q1</result>
  asked at token 50 with 3 slots: H 2 over 8 tokens, baseline 1, dH +1, P 0.7 against 0.5: 1 fork
  | 0.0 agent | other words<answer>1</answer>
  |     = reward 0.5, wrong, stop eos, 81 tokens, 1 call, forked at token 50 of 0
  agent | more words<answer>1</answer>
  = reward 1, correct, stop eos, 79 tokens, 1 call

A bar leads along a fork; what follows behind its last bar is the path it was forked from.
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from mega_agentrl.rollout.nodes import shown
from mega_agentrl.rollout.render import question_lines, summary, turn_lines
from mega_agentrl.types.records import Decision, RolloutTree, Trajectory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Forks = dict[tuple[int, ...], list[Trajectory]]


def render_tree(tree: RolloutTree) -> str:
    """The tree as lines of text, without a line end at the end."""
    forks: Forks = {}
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
    """What the path wrote itself, with its forks, the first line behind its name."""
    children = list(forks.get(one.path, ()))
    decisions = list(one.decisions)
    lines: list[str] = []
    for turn in one.turns:
        if turn.start < one.fork_len:
            continue
        lines += [*_made_at(turn.start, decisions, children, forks), *turn_lines(turn)]
    lines += _made_at(len(one.token_ids), decisions, children, forks)
    lines.append(f"= {summary(one)}")
    name = shown(one.path)
    return [f"{name if not i else '':<{len(name)}} {line}" for i, line in enumerate(lines)]


def _made_at(
    position: int,
    decisions: list[Decision],
    children: list[Trajectory],
    forks: Mapping[tuple[int, ...], Sequence[Trajectory]],
) -> Iterator[str]:
    """Decisions and forks up to a position; takes them off the lists."""
    while decisions and decisions[0].at <= position:
        yield decision_line(decisions.pop(0))
    while children and children[0].fork_len <= position:
        yield from (f"| {line}" for line in _path_lines(children.pop(0), forks))


def decision_line(decision: Decision) -> str:
    """What was asked and what was answered."""
    probe, p, tau = decision.probe_entropies, decision.probability, decision.threshold
    read: list[str] = []
    if decision.delta_h is not None:
        read.append(f"H {fmean(probe):.3g} over {_count(len(probe), 'token')}")
        read.append(f"baseline {decision.baseline:.3g}")
        read.append(f"dH {decision.delta_h:+.3g}")
    if p is not None:
        read.append(f"P {p:.3g}" + ("" if tau is None else f" against {tau:.3g}"))
    asked = f"asked at token {decision.at} with {_count(decision.slots, 'slot')}"
    made = _count(decision.num_forks, "fork") if decision.num_forks else "no fork"
    return ": ".join(part for part in (asked, ", ".join(read), made) if part)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
