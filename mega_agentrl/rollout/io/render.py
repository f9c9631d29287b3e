r"""Trajectories as human-readable text: the question, the turns with their roles, the score.

question toolqa/12: What is 3 plus 4?
  truth   7
  agent | <think> add </think> <python> 3+4 </python>
  tool  | <result> 7 </result>
  agent | <answer> \boxed{7} </answer>
  tools   python: steps 0.5, final 1
  reward 1.15 = rule 1 + tool/python 0.15, correct, stop eos, 41 tokens, 1 call
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.types.records import Role

if TYPE_CHECKING:
    from mega_agentrl.types.records import Prompt, Trajectory, Turn

# Text of tools and models must not control the terminal it is shown in.
_CONTROL_CHAR_ESCAPES = {
    code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))
}
# Lone surrogates, which JSON strings can hold and UTF-8 files cannot.
_CONTROL_CHAR_ESCAPES |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}

AUTHOR_NAMES = {Role.assistant: "agent", Role.tool: "tool", Role.user: "user"}


def render_trajectory(trajectory: Trajectory) -> str:
    """Render a trajectory as lines of text, without a trailing newline."""
    lines = [
        *question_lines(trajectory.prompt),
        *(f"  {line}" for turn in trajectory.turns for line in turn_lines(turn)),
        *_reward_lines(trajectory),
        f"  {summary_line(trajectory)}",
    ]
    return "\n".join(lines)


def question_lines(prompt: Prompt) -> list[str]:
    """Render the question and the ground truth."""
    question = str(prompt.messages[-1]["content"]) if prompt.messages else ""
    truth = prompt.ground_truth
    return [
        f"question {prompt.prompt_id}: {question}".translate(_CONTROL_CHAR_ESCAPES),
        f"  {'truth':<6}  {truth if isinstance(truth, str) else ' | '.join(truth)}".translate(
            _CONTROL_CHAR_ESCAPES
        ),
    ]


def turn_lines(turn: Turn) -> list[str]:
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
    given = sorted({name for name, rewards in steps.items() if any(rewards)} | set(final))
    if not given:
        return []
    texts = []
    for name in given:
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
        sum_of = " + ".join(f"{name} {value:g}" for name, value in score.parts.items())
        reward = f"reward {score.value:g}" + (f" = {sum_of}" if sum_of else "")
        parts = [reward, "correct" if score.correct else "wrong"]
        if score.reason:
            # The reason may quote the policy.
            reason = score.reason.translate(_CONTROL_CHAR_ESCAPES).replace("\n", "\\n")
            parts[-1] += f" ({reason})"
    parts += [
        f"stop {trajectory.stop_reason.value}",
        f"{len(trajectory.token_ids)} tokens",
        f"{calls} call{'' if calls == 1 else 's'}",
    ]
    if trajectory.parent_id is not None:
        parent = ".".join(map(str, trajectory.path[:-1]))
        parts.append(f"forked at token {trajectory.fork_len} of {parent}")
    return ", ".join(parts)
