r"""Trajectories and rollout trees as human-readable text.

A trajectory is the question, the turns with their roles, and the score::

    question toolqa/12: What is 3 plus 4?
      truth   7
      agent | <think> add </think> <python> 3+4 </python>
      tool  | <result> 7 </result>
      agent | <answer> \boxed{7} </answer>
      tools   python: steps 0.5, final 1
      reward 1.15 = rule 1 + tool/python 0.15, correct, stop eos, 41 tokens, 1 call

A tree shows each turn once, and each fork at its position. Lines of a fork begin with a bar; the
path that it was forked from continues below its last bar::

    question set/0: how?
      truth   1
    0 agent | think hard<search>q1</search>
      tool  | <result>ok:q1</result>
      asked at token 50 with 3 slots: H 2 over 8 tokens, baseline 1, dH +1, P 0.7 against 0.5:
        1 fork
      | 0.0 agent | other words<answer>1</answer>
      |     = reward 0.5, wrong, stop eos, 81 tokens, 1 call, forked at token 50 of 0
      agent | more words<answer>1</answer>
      = reward 1, correct, stop eos, 79 tokens, 1 call
"""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from mega_agentrl.rollout.io.nodes import format_path
from mega_agentrl.types.ground_truth import ground_truth_text
from mega_agentrl.types.records import Role
from mega_agentrl.vision.placeholders import content_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mega_agentrl.types.records import BranchDecision, Prompt, RolloutTree, Trajectory, Turn

    ForksByParent = Mapping[tuple[int, ...], Sequence[Trajectory]]

# Text of tools and models must not control the terminal.
_CONTROL_CHAR_ESCAPES = {
    code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))
}
# Lone surrogates, which JSON strings can hold and UTF-8 files cannot.
_CONTROL_CHAR_ESCAPES |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}

AUTHOR_NAMES = {Role.assistant: "agent", Role.tool: "tool", Role.user: "user"}


def render_trajectory(trajectory: Trajectory) -> str:
    """Render a trajectory as lines of text, without a trailing newline."""
    lines = [
        *_question_lines(trajectory.prompt),
        *(f"  {line}" for turn in trajectory.turns for line in _turn_lines(turn)),
        *_reward_lines(trajectory),
        f"  {summary_line(trajectory)}",
    ]
    return "\n".join(lines)


def render_tree(tree: RolloutTree) -> str:
    """Render a tree as lines of text, without a trailing newline."""
    forks: dict[tuple[int, ...], list[Trajectory]] = {}
    for trajectory in tree.trajectories:
        if trajectory.parent_id is not None:
            forks.setdefault(trajectory.path[:-1], []).append(trajectory)
    lines = [
        *_question_lines(tree.prompt),
        f"  {len(tree.trajectories)} paths: {tree.num_forks} forks, "
        f"{tree.num_extra_roots} extra roots",
    ]
    for trajectory in tree.trajectories:
        if trajectory.parent_id is None:
            lines += _path_lines(trajectory, forks)
    return "\n".join(lines)


def _question_lines(prompt: Prompt) -> list[str]:
    """Render the question and the ground truth."""
    question = content_text(prompt.messages[-1]["content"]) if prompt.messages else ""
    return [
        f"question {prompt.prompt_id}: {question}".translate(_CONTROL_CHAR_ESCAPES),
        f"  {'truth':<6}  {ground_truth_text(prompt.ground_truth)}".translate(
            _CONTROL_CHAR_ESCAPES
        ),
    ]


def _turn_lines(turn: Turn) -> list[str]:
    """Render role and text of a turn; a turn without text shows its tool outcome."""
    text = turn.text.strip()
    if turn.outcome is not None and not text:
        text = f"({turn.outcome.status.value}, not shown to the agent) {turn.outcome.answer}"
    text = text.translate(_CONTROL_CHAR_ESCAPES)
    names = [AUTHOR_NAMES[turn.role]]
    return [
        f"{name:<6}| {line}".rstrip()
        for name, line in zip(
            names + [""] * text.count("\n"), text.split("\n") or [""], strict=True
        )
    ]


def _reward_lines(trajectory: Trajectory) -> list[str]:
    """Render the tools' rewards, if any."""
    steps, final = trajectory.step_rewards, trajectory.tool_rewards
    rewarded_tools = sorted({name for name, rewards in steps.items() if any(rewards)} | set(final))
    if not rewarded_tools:
        return []
    texts = []
    for name in rewarded_tools:
        parts = [f"{reward:g}" for reward in steps.get(name, [])]
        entries = [f"steps {' '.join(parts)}"] if parts else []
        entries += [f"final {final[name]:g}"] if name in final else []
        texts.append(f"{name}: {', '.join(entries)}")
    return [f"  {'tools':<6}  {'; '.join(texts)}"]


def summary_line(trajectory: Trajectory) -> str:
    """Render reward, stop reason and size on one line."""
    score, calls = trajectory.score, trajectory.num_tool_calls
    if score is None:
        parts = ["failed, not scored" if trajectory.failed else "not scored"]
    else:
        weighted_parts = " + ".join(f"{name} {value:g}" for name, value in score.parts.items())
        reward = f"reward {score.value:g}" + (f" = {weighted_parts}" if weighted_parts else "")
        parts = [reward, "correct" if score.correct else "wrong"]
        if score.reason:
            # The reason may quote the policy.
            reason = score.reason.translate(_CONTROL_CHAR_ESCAPES).replace("\n", "\\n")
            parts[-1] += f" ({reason})"
    parts += [
        f"stop {trajectory.stop_reason.value}",
        f"{len(trajectory.token_ids)} tokens",
        _pluralize(calls, "call"),
    ]
    if trajectory.parent_id is not None:
        parent = format_path(trajectory.path[:-1])
        parts.append(f"forked at token {trajectory.fork_len} of {parent}")
    return ", ".join(parts)


def _path_lines(trajectory: Trajectory, forks: ForksByParent) -> list[str]:
    """Render the turns of a path that are not inherited, and its forks; the name comes first.

    A turn that a path shares with its parent up to the fork is rendered whole.
    """
    children = list(forks.get(trajectory.path, ()))
    decisions = list(trajectory.decisions)
    lines: list[str] = []
    for turn in trajectory.turns:
        if turn.start < trajectory.fork_len and turn.stop <= trajectory.fork_len:
            continue
        lines += [*_pop_forks_until(turn.start, decisions, children, forks), *_turn_lines(turn)]
    lines += _pop_forks_until(len(trajectory.token_ids), decisions, children, forks)
    lines.append(f"= {summary_line(trajectory)}")
    name = format_path(trajectory.path)
    return [f"{name if not i else '':<{len(name)}} {line}" for i, line in enumerate(lines)]


def _pop_forks_until(
    position: int,
    decisions: list[BranchDecision],
    children: list[Trajectory],
    forks: ForksByParent,
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
