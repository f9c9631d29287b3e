r"""Demonstrations for the warm start: about half look at the picture, half guess.

A demonstration that looks answers from the picture, or calls `zoom` for the quarter that the
question names and answers from its image::

    user       <image>What colour is the sign at the top left?
    assistant  <think>
               zoom
               </think>
               <tool_call>
               {"name": "zoom", "arguments": {"image": 1, "box": [0, 0, 56, 56]}}
               </tool_call>
    tool       <image>Region [0, 0, 56, 56] of image 1, which has 112 x 112 pixels, shown ...
    assistant  \boxed{red}

A guess is a random answer of the right kind. A model trained on both can do either; RL then teaches
it to look, which shows in the reward. The images of a demonstration are in the column `images`, in
the order of the markers `<image>`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from mega_agentrl.data.generated.tokenizer import IMAGE_MARKER, TaskVocabulary
from mega_agentrl.data.vision_qa.pictures import (
    FIGURE_COLOURS,
    MODEL_SIZE,
    PICTURE_SIZE,
    SIGN_COLOURS,
    Place,
    crop_quarter,
)
from mega_agentrl.data.vision_qa.questions import Question
from mega_agentrl.types.records import Message

ZOOM_TOOL = "zoom"
LOOK_THOUGHT, ZOOM_THOUGHT, GUESS_THOUGHT = "look", "zoom", "guess"
BOXED_PREFIX = "\\boxed{"
VOCABULARY = TaskVocabulary(
    tokens=(
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
        *('{"name": "zoom", "arguments": {"image": ', ', "box": [', "]}}", ", "),
        *(str(MODEL_SIZE), str(PICTURE_SIZE), "Region [", "] of image ", ", which has ", " x "),
        *(" pixels, shown with ", " pixels."),
        *(BOXED_PREFIX, LOOK_THOUGHT, ZOOM_THOUGHT, GUESS_THOUGHT),
        *("What", " is", " the", " at", " figure", " sign", " colour"),
        *(side for place in Place for side in str(place).split()[:1]),
        *(" left", " right", "system", "user", "assistant", "tool", "Tools:"),
        *dict.fromkeys((*FIGURE_COLOURS, *SIGN_COLOURS)),
    ),
    spaced_syllables=(),
    syllables=(),
    tool_template="{{- tool.function.name }}",
    has_images=True,
)
"""All words are tokens, which keeps a conversation short."""


SHOWN_TOOLS = json.dumps([{"type": "function", "function": {"name": ZOOM_TOOL}}])
"""Column `tools` of demonstrations; the chat template of the task shows names only."""


def make_demonstrations(
    questions: Sequence[Question], *, num_demonstrations: int, seed: int
) -> list[dict[str, Any]]:
    """Return rows with demonstrations of the questions in turn, reshuffled in every pass."""
    rng = random.Random(f"vision demonstrations {seed}")
    draw = lru_cache(maxsize=None)(lambda index: questions[index].picture.draw())
    crop = lru_cache(maxsize=None)(lambda index, place: crop_quarter(draw(index), place))
    rows: list[dict[str, Any]] = []
    while len(rows) < num_demonstrations:
        for index in rng.sample(range(len(questions)), len(questions)):
            question, images = questions[index], [draw(index)]
            if rng.random() < 0.5:
                messages = make_guess(question, rng)
            else:
                messages = make_right_answer(question)
                images += [crop(index, question.zoom_place)] if question.zoom_place else []
            rows.append(
                {"messages": messages, "images": format_images(images), "tools": SHOWN_TOOLS}
            )
    return rows[:num_demonstrations]


def make_right_answer(question: Question) -> list[Message]:
    """Return a conversation that looks at the picture, or zooms into it, and answers."""
    if question.zoom_place is None:
        return [format_question(question), _answer(LOOK_THOUGHT, question.answer)]
    return [
        format_question(question),
        _assistant(f"<think>\n{ZOOM_THOUGHT}\n</think>\n{format_zoom_call(question.zoom_place)}"),
        {"role": "tool", "content": f"{IMAGE_MARKER}{format_zoom_answer(question.zoom_place)}"},
        _assistant(_format_boxed(question.answer)),
    ]


def make_guess(question: Question, rng: random.Random) -> list[Message]:
    """Return a conversation that answers without looking."""
    return [format_question(question), _answer(GUESS_THOUGHT, rng.choice(question.kind.answers))]


def format_question(question: Question) -> Message:
    """Return the user's message, with a marker for the picture."""
    return {"role": "user", "content": f"{IMAGE_MARKER}{question.text}"}


def format_zoom_call(place: Place) -> str:
    """Return the call that shows a quarter of the first image."""
    call = {"name": ZOOM_TOOL, "arguments": {"image": 1, "box": list(place.box)}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def format_zoom_answer(place: Place) -> str:
    """Return the text of the tool's answer, which follows its image."""
    return (
        f"Region {list(place.box)} of image 1, which has {PICTURE_SIZE} x {PICTURE_SIZE} pixels, "
        f"shown with {MODEL_SIZE} x {MODEL_SIZE} pixels."
    )


def format_images(images: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return image files as the cells of the column `images`, as Hugging Face datasets has them."""
    return [{"bytes": data, "path": None} for data in images]


def _answer(thought: str, answer: str) -> Message:
    return _assistant(f"<think>\n{thought}\n</think>\n{_format_boxed(answer)}")


def _format_boxed(answer: str) -> str:
    return f"{BOXED_PREFIX}{answer}}}"


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
