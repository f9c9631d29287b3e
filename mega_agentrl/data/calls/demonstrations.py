"""Demonstrations for the warm start: about half read the request, half guess.

An answer that reads the request first names each requested function and its parameter, or `none` if
the function is not on offer, and then makes the calls. A guess calls a function of the catalogue
with a random value, which is almost always wrong. A model trained on both can do either; RL then
teaches it to read, which shows in the reward.

Calls are written as the Hermes protocol reads them, one block each. The chat template shows a
function as `Bako count: integer`, and every name has the same tokens in the catalogue, in the
request and in the answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from mega_agentrl.data.calls.functions import (
    PARAMETER_NAMES,
    TEXT_VALUES,
    Call,
    Function,
    ParameterType,
    make_call,
)
from mega_agentrl.data.calls.requests import Request
from mega_agentrl.data.generated.entity_splits import ENTITY_PREFIXES, ENTITY_SUFFIXES
from mega_agentrl.data.generated.tokenizer import TaskVocabulary

THINK_TAGS = ("<think>", "</think>")
CALL_TAGS = ("<tool_call>", "</tool_call>")
CALL_TOKENS = ('{"name": "', '", "arguments": {"', '": ', '"}}', "}}")
GUESS_THOUGHT, NO_FUNCTION_THOUGHT = "guess", " none"
NO_FUNCTION_ANSWER = "None."
VOCABULARY = TaskVocabulary(
    tokens=(
        *THINK_TAGS,
        *CALL_TAGS,
        *CALL_TOKENS,
        *(f": {kind}" for kind in ParameterType),
        *(f" {name}" for name in PARAMETER_NAMES.values()),
        *PARAMETER_NAMES.values(),
        *TEXT_VALUES,
        *("system", "Tools:", "Call:", " with ", "yes", "no", "true", "false"),
        *(GUESS_THOUGHT, NO_FUNCTION_THOUGHT, NO_FUNCTION_ANSWER),
    ),
    spaced_syllables=(),
    syllables=(*ENTITY_PREFIXES, *ENTITY_SUFFIXES),
    tool_template="""\
{{- tool.function.name }}
{%- for name, schema in tool.function.parameters.properties.items() -%}
{{- ' ' + name + ': ' + schema.type }}
{%- endfor %}""",
)
"""All words but the names are tokens, which keeps a conversation short."""


def format_tools(catalogue: Sequence[Function]) -> str:
    """Return the catalogue as JSON text for the column `tools`."""
    return json.dumps([function.schema for function in catalogue])


def make_demonstrations(
    requests: Sequence[Request], *, num_demonstrations: int, seed: int
) -> list[dict[str, Any]]:
    """Return rows with demonstrations of the requests in turn, reshuffled in every pass."""
    rng = random.Random(f"calls demonstrations {seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < num_demonstrations:
        for request in rng.sample(requests, len(requests)):
            guesses = rng.random() < 0.5
            answer = make_guess(request, rng) if guesses else make_right_answer(request)
            messages = [
                {"role": "user", "content": request.text},
                {"role": "assistant", "content": answer},
            ]
            rows.append({"messages": messages, "tools": format_tools(request.catalogue)})
    return rows[:num_demonstrations]


def make_right_answer(request: Request) -> str:
    """Return the answer that makes the expected calls, or none."""
    thoughts = [
        function.name
        + (f" {function.parameter}" if function in request.catalogue else NO_FUNCTION_THOUGHT)
        for function in request.requested
    ]
    return _format_answer("\n".join(thoughts), request.calls)


def make_guess(request: Request, rng: random.Random) -> str:
    """Return an answer that calls a function of the catalogue with random values."""
    call = make_call(rng.choice(request.catalogue), rng)
    return _format_answer(GUESS_THOUGHT, [call])


def _format_answer(thought: str, calls: Sequence[Call]) -> str:
    blocks = [f"<tool_call>\n{json.dumps(call.as_dict)}\n</tool_call>" for call in calls]
    return f"<think>\n{thought}\n</think>\n" + ("\n".join(blocks) or NO_FUNCTION_ANSWER)
