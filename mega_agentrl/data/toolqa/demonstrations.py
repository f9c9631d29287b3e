"""Demonstrations for the warm start: half of them use the tools, half guess.

The guessing half writes a number of the right size or a random name without a call, which
is almost always wrong. A model trained on both can do either; what RL then teaches is to
use the tools, and that is visible in the reward.

A demonstration is a list of chat messages. Tool answers are messages of role `tool` whose
content is what a rollout appends to the context, so that the loss mask is exact.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from mega_agentrl.data.toolqa.names import value_names
from mega_agentrl.data.toolqa.questions import Kind, Question
from mega_agentrl.types.records import Message

THOUGHTS = {"python": "compute", "search": "look up", None: "guess"}


def result_text(answer: str) -> str:
    """A tool's answer as a rollout appends it."""
    return f" <result>\n{answer}\n</result>"


def make_demonstrations(
    questions: Sequence[Question], *, num_demonstrations: int, seed: int
) -> list[list[Message]]:
    """Demonstrations over the questions in turn, reshuffled each time round."""
    rng = random.Random(f"toolqa demonstrations {seed}")
    demonstrations: list[list[Message]] = []
    while len(demonstrations) < num_demonstrations:
        for question in rng.sample(questions, len(questions)):
            guesses = rng.random() < 0.5
            demonstrations.append(guess(question, rng) if guesses else use_tools(question))
    return demonstrations[:num_demonstrations]


def use_tools(question: Question) -> list[Message]:
    """Think, call, read, and answer what was read."""
    messages: list[Message] = [{"role": "user", "content": question.text}]
    before = f"<think> {THOUGHTS[question.calls[0].tool]} </think>"
    for call in question.calls:
        text = f"{before} <{call.tool}> {call.text} </{call.tool}>"
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "tool", "content": result_text(call.result)})
        before = ""
    messages.append({"role": "assistant", "content": _final(question.answer)})
    return messages


def guess(question: Question, rng: random.Random) -> list[Message]:
    """Think and answer something plausible."""
    if question.kind is Kind.search:
        answer = rng.choice(value_names())
    else:
        near = round(int(question.answer) * rng.uniform(0.8, 1.25))
        answer = str(min(9999, max(1000, near)))
    text = f"<think> {THOUGHTS[None]} </think>{_final(answer)}"
    return [
        {"role": "user", "content": question.text},
        {"role": "assistant", "content": text},
    ]


def _final(answer: str) -> str:
    return f" <answer> \\boxed{{{answer}}} </answer>"
