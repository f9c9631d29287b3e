"""Demonstrations for the warm start: about half use the tools, half guess.

A guess is a number of the right size or a random name without any call, which is almost always
wrong. A model trained on both can do either; RL then teaches it to use the tools, which shows in
the reward.

A demonstration is a list of chat messages. Tool answers are messages of role `tool` with exactly
the text that a rollout appends to the context, so that the loss mask is exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from mega_agentrl.data.generated.entity_splits import (
    ENTITY_PREFIXES,
    ENTITY_SUFFIXES,
    VALUE_PREFIXES,
    VALUE_SUFFIXES,
    value_names,
)
from mega_agentrl.data.generated.tokenizer import TaskVocabulary
from mega_agentrl.data.toolqa.chat_demonstrations import (
    BOXED_PREFIX,
    THOUGHT_BY_TOOL,
    format_chat_guess,
    make_tool_chat,
)
from mega_agentrl.data.toolqa.questions import Question, QuestionKind
from mega_agentrl.types.records import Message

TAGS = tuple(
    f"<{slash}{name}>"
    for name in ("think", "python", "search", "result", "answer")
    for slash in ("", "/")
)
VOCABULARY = TaskVocabulary(
    tokens=(*TAGS, BOXED_PREFIX),
    spaced_syllables=ENTITY_PREFIXES,
    syllables=(*ENTITY_SUFFIXES, *VALUE_PREFIXES, *VALUE_SUFFIXES),
)


def format_tool_result(answer: str) -> str:
    """Format a tool's answer as a rollout appends it."""
    return f" <result>\n{answer}\n</result>"


def make_demonstrations(
    questions: Sequence[Question], *, num_demonstrations: int, seed: int, in_chat: bool = False
) -> list[list[Message]]:
    """Return demonstrations of the questions in turn, reshuffled in every pass.

    With `in_chat` calls and answers have the form of `toolqa.chat_demonstrations`.
    """
    rng = random.Random(f"toolqa demonstrations {seed}")
    make_tool = make_tool_chat if in_chat else make_tool_demonstration
    format_guess = format_chat_guess if in_chat else _format_guess
    demonstrations: list[list[Message]] = []
    while len(demonstrations) < num_demonstrations:
        for question in rng.sample(questions, len(questions)):
            guesses = rng.random() < 0.5
            demonstrations.append(
                make_guess_demonstration(question, rng, format_guess)
                if guesses
                else make_tool(question)
            )
    return demonstrations[:num_demonstrations]


def make_tool_demonstration(question: Question) -> list[Message]:
    """Return a conversation that calls the tools and gives the true answer."""
    messages: list[Message] = [{"role": "user", "content": question.text}]
    thought = f"<think> {THOUGHT_BY_TOOL[question.calls[0].tool]} </think>"
    for call in question.calls:
        text = f"{thought} <{call.tool}> {call.text} </{call.tool}>"
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "tool", "content": format_tool_result(call.result)})
        thought = ""
    messages.append({"role": "assistant", "content": _format_final_answer(question.answer)})
    return messages


def _format_guess(answer: str) -> str:
    return f"<think> {THOUGHT_BY_TOOL[None]} </think>{_format_final_answer(answer)}"


def make_guess_demonstration(
    question: Question, rng: random.Random, format_guess: Callable[[str], str] = _format_guess
) -> list[Message]:
    """Return a conversation that guesses a plausible answer."""
    if question.kind is QuestionKind.search:
        answer = rng.choice(value_names())
    else:
        guess = round(int(question.answer) * rng.uniform(0.8, 1.25))
        answer = str(min(9999, max(1000, guess)))
    return [
        {"role": "user", "content": question.text},
        {"role": "assistant", "content": format_guess(answer)},
    ]


def _format_final_answer(answer: str) -> str:
    return f" <answer> \\boxed{{{answer}}} </answer>"
