"""A trajectory as text for people: the question, the turns with their authors, the score.

question toolqa/12: What is 3 plus 4?
  truth   7
  agent | <think> add </think> <python> 3+4 </python>
  tool  | <result> 7 </result>
  agent | <answer> \\boxed{7} </answer>
  reward 1, correct, stop eos, 41 tokens, 1 call, forked at token 12 of 0.1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.types.records import Author

if TYPE_CHECKING:
    from mega_agentrl.types.records import Trajectory, Turn

NAME_OF = {Author.assistant: "agent", Author.tool: "tool"}


def render(trajectory: Trajectory) -> str:
    """The trajectory as lines of text, without a line end at the end."""
    prompt = trajectory.prompt
    question = str(prompt.messages[-1]["content"]) if prompt.messages else ""
    truth = prompt.ground_truth
    lines = [
        f"question {prompt.prompt_id}: {question}",
        f"  {'truth':<6}  {truth if isinstance(truth, str) else ' | '.join(truth)}",
        *(line for turn in trajectory.turns for line in _turn_lines(turn)),
        f"  {_summary(trajectory)}",
    ]
    return "\n".join(lines)


def _turn_lines(turn: Turn) -> list[str]:
    text = turn.text.strip()
    if turn.outcome is not None and not text:
        text = f"({turn.outcome.status.value}, not shown to the agent) {turn.outcome.answer}"
    names = [NAME_OF[turn.author]]
    return [
        f"  {name:<6}| {line}".rstrip()
        for name, line in zip(
            names + [""] * text.count("\n"), text.split("\n") or [""], strict=True
        )
    ]


def _summary(trajectory: Trajectory) -> str:
    score, calls = trajectory.score, trajectory.num_calls
    if score is None:
        parts = ["failed, not scored" if trajectory.failed else "not scored"]
    else:
        parts = [f"reward {score.value:g}", "correct" if score.correct else "wrong"]
        if score.reason:
            parts[-1] += f" ({score.reason})"
    parts += [
        f"stop {trajectory.stop_reason.value}",
        f"{len(trajectory.token_ids)} tokens",
        f"{calls} call{'' if calls == 1 else 's'}",
    ]
    if trajectory.parent_id is not None:
        parent = ".".join(map(str, trajectory.path[:-1]))
        parts.append(f"forked at token {trajectory.fork_len} of {parent}")
    return ", ".join(parts)
