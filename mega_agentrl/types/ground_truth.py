"""Ground truths: what a row of a dataset says about the right answer.

A `Prompt` has the value of its row, which may be any JSON value. A user's reward function gets it
as it is. Parts that compare texts read it through `accepted_answers`:

| ground truth | accepted answers |
| --- | --- |
| `"34"` | `34` |
| `34`, `34.0`, `2.5`, `True` | `34`, `34`, `2.5`, `True` |
| `["Paris", 2]` | `Paris` and `2` |
| `{"target": ["Paris", "City of Paris"]}` (Search-R1) | those of `target` |
| `None`, `""`, `[]`, another object | an error: there is no answer to compare with |

The part `function_call` reads each accepted answer as calls, `[{"name": "f", "arguments": {...}}]`.
Where an argument has several accepted values, a call has `accepted` instead of `arguments`:

    [{"name": "area", "accepted": {"base": [10], "unit": ["cm", "m"]}, "optional": ["unit"]}]

Each argument must have one of its listed values, or be left out if it is `optional`; no others may
be given. A listed value, or an item of a listed list, that is itself an object with exactly the
members `accepted` and `optional` stands for every object whose members meet the same rule. All
other values are literal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mega_agentrl.errors import InputError

_TARGET = "target"
_MAX_CHARS = 100_000
"""Length of the longest accepted answer."""
_MAX_INT_BITS = 14_000
"""Size of the largest integer; Python prints none of more than 4300 digits."""


def accepted_answers(truth: Any, *, allow_blank: bool = False) -> tuple[str, ...]:
    """Return the texts of which an answer has to match one.

    Numbers become their shortest exact decimal text, without an exponent or a fraction of zero.

    Args:
        truth: the ground truth of a prompt, a JSON value.
        allow_blank: whether blank texts count, as where no call is expected; they are left out
            otherwise.

    Raises:
        InputError: the value is not a text, a number, a list of these, or an object with such a
            `target`, or there is no text.
    """
    target = truth.get(_TARGET) if isinstance(truth, Mapping) else truth
    items = target if isinstance(target, list | tuple) else [target]
    texts = [_answer_text(item) for item in items]
    answers = [text for text in texts if text is not None and (allow_blank or text.strip())]
    if not answers or None in texts:
        raise InputError(
            "ground_truth",
            truth,
            'a text, a number, a list of these, or {"target": one of these}',
            "a truth for a reward function of your own, or a row without an answer",
        )
    return tuple(answers)


def ground_truth_text(truth: Any) -> str:
    """Return a ground truth as text for people and judges: answers separated by ` | `, or JSON."""
    try:
        return " | ".join(accepted_answers(truth, allow_blank=True))
    except InputError:
        return "" if truth is None else json.dumps(truth, ensure_ascii=False, default=str)


def _answer_text(value: Any) -> str | None:
    """Return a text or number as text, None for any other value."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return np.format_float_positional(value, trim="-") if math.isfinite(value) else None
    if isinstance(value, int):
        return str(value) if value.bit_length() <= _MAX_INT_BITS else None
    return value if isinstance(value, str) and len(value) <= _MAX_CHARS else None
