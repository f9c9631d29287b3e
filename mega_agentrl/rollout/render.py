"""A trajectory as text for people: the question, the turns with their authors, the score.

question toolqa/12: What is 3 plus 4?
  truth   7
  agent | <think> add </think> <python> 3+4 </python>
  tool  | <result> 7 </result>
  agent | <answer> \\boxed{7} </answer>
  tools   python: steps 0.5, final 1
  reward 1.15 = rule 1 + tool/python 0.15, correct, stop eos, 41 tokens, 1 call
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mega_agentrl.types.records import Author

if TYPE_CHECKING:
    from mega_agentrl.types.records import Prompt, Trajectory, Turn

# What a tool or a model says must not steer the terminal it is shown in.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
# Halves of surrogate pairs, which a JSON string can hold and a file in UTF-8 cannot.
_VISIBLE |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}

NAME_OF = {Author.assistant: "agent", Author.tool: "tool", Author.user: "user"}


def render(trajectory: Trajectory) -> str:
    """The trajectory as lines of text, without a line end at the end."""
    lines = [
        *question_lines(trajectory.prompt),
        *(f"  {line}" for turn in trajectory.turns for line in turn_lines(turn)),
        *_reward_lines(trajectory),
        f"  {summary(trajectory)}",
    ]
    return "\n".join(lines)


def question_lines(prompt: Prompt) -> list[str]:
    """Question and truth."""
    question = str(prompt.messages[-1]["content"]) if prompt.messages else ""
    truth = prompt.ground_truth
    return [
        f"question {prompt.prompt_id}: {question}".translate(_VISIBLE),
        f"  {'truth':<6}  {truth if isinstance(truth, str) else ' | '.join(truth)}".translate(
            _VISIBLE
        ),
    ]


def turn_lines(turn: Turn) -> list[str]:
    """Author and text; a failure that has no text says what the tool said."""
    text = turn.text.strip()
    if turn.outcome is not None and not text:
        text = f"({turn.outcome.status.value}, not shown to the agent) {turn.outcome.answer}"
    text = text.translate(_VISIBLE)
    names = [NAME_OF[turn.author]]
    return [
        f"{name:<6}| {line}".rstrip()
        for name, line in zip(
            names + [""] * text.count("\n"), text.split("\n") or [""], strict=True
        )
    ]


def _reward_lines(trajectory: Trajectory) -> list[str]:
    """What the tools gave, where any gave something."""
    steps, final = trajectory.step_rewards, trajectory.tool_rewards
    given = sorted({name for name, rewards in steps.items() if any(rewards)} | set(final))
    if not given:
        return []
    texts = []
    for name in given:
        parts = [f"{reward:g}" for reward in steps.get(name, [])]
        said = [f"steps {' '.join(parts)}"] if parts else []
        said += [f"final {final[name]:g}"] if name in final else []
        texts.append(f"{name}: {', '.join(said)}")
    return [f"  {'tools':<6}  {'; '.join(texts)}"]


def summary(trajectory: Trajectory) -> str:
    """Reward, how it ended, and its size, on one line."""
    score, calls = trajectory.score, trajectory.num_calls
    if score is None:
        parts = ["failed, not scored" if trajectory.failed else "not scored"]
    else:
        sum_of = " + ".join(f"{name} {value:g}" for name, value in score.parts.items())
        reward = f"reward {score.value:g}" + (f" = {sum_of}" if sum_of else "")
        parts = [reward, "correct" if score.correct else "wrong"]
        if score.reason:
            # It may quote the policy.
            reason = score.reason.translate(_VISIBLE).replace("\n", "\\n")
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
