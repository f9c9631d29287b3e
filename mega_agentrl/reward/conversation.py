"""Describes a trajectory to reward functions and judges: its messages, turns and tool rewards."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from mega_agentrl.types.records import Role
from mega_agentrl.vision.placeholders import content_text

if TYPE_CHECKING:
    from mega_agentrl.types.records import Message, Trajectory


def row_values(trajectory: Trajectory) -> dict[str, Any]:
    """Return the values that a user's reward function may ask for, by name of the argument.

    As in verl, `extra_info` has the row's own fields, and `num_turns` and `rollout_reward_scores`.
    """
    prompt = trajectory.prompt
    turns, rewards = count_turns(trajectory), tool_rewards(trajectory)
    run_info = {"num_turns": turns, "rollout_reward_scores": rewards}
    return {
        "data_source": prompt.data_source,
        "solution_str": trajectory.response_text,
        "ground_truth": prompt.ground_truth,
        "extra_info": dict(prompt.extra_info) | run_info,
        "messages": conversation(trajectory),
        "num_turns": turns,
        "stop_reason": trajectory.stop_reason.value,
        "tool_rewards": rewards,
        "response_length": len(trajectory.token_ids),
    }


def conversation(trajectory: Trajectory) -> list[Message]:
    """Return the messages of the prompt and of the response, with text as content.

    A tool's message has the `name` of the tool and its answer; images are placeholders.
    """
    messages: list[Message] = [
        dict(message) | {"content": content_text(message.get("content") or "")}
        for message in trajectory.prompt.messages
    ]
    for turn in trajectory.turns:
        message: Message = {"role": turn.role.value, "content": turn.text}
        if turn.outcome is not None:
            message |= {"name": turn.outcome.tool, "content": turn.outcome.answer}
        messages.append(message)
    return messages


def count_turns(trajectory: Trajectory) -> int:
    """Return the number of turns as verl counts them: the prompt, and each change of author.

    A direct answer has 2. The answers to the calls of one assistant turn are one turn.
    """
    authors = (turn.role is Role.assistant for turn in trajectory.turns)
    return 1 + sum(1 for _ in groupby(authors))


def tool_rewards(trajectory: Trajectory) -> dict[str, float]:
    """Return the reward of each tool and simulated user: its step rewards and its final reward."""
    rewards = {name: sum(steps) for name, steps in trajectory.step_rewards.items()}
    for name, value in trajectory.tool_rewards.items():
        rewards[name] = rewards.get(name, 0.0) + value
    return rewards
