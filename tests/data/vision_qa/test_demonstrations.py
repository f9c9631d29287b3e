"""Demonstrations are what a rollout would produce: those that look earn the reward."""

from __future__ import annotations

import asyncio
import random

from mega_agentrl.config.sections.tools import ZoomToolConfig
from mega_agentrl.data.generated.entity_splits import Split
from mega_agentrl.data.vision_qa.demonstrations import (
    GUESS_THOUGHT,
    format_zoom_answer,
    format_zoom_call,
    make_demonstrations,
    make_guess,
    make_right_answer,
)
from mega_agentrl.data.vision_qa.pictures import MODEL_SIZE, Place, crop_quarter
from mega_agentrl.data.vision_qa.questions import make_questions, split_figures
from mega_agentrl.reward.ares import accuracy
from mega_agentrl.tool.call_protocol.hermes import HermesProtocol
from mega_agentrl.tool.zoom import ZoomTool
from mega_agentrl.types.images import ImageInput
from mega_agentrl.types.records import ToolCall
from mega_agentrl.vision.processor import ImageProcessor
from tests.vision_models import write_preprocessor_config

QUESTIONS = make_questions(Split.dev, split_figures(0), num_questions=90, seed=0)


def written(messages):
    return "".join(item["content"] for item in messages if item["role"] == "assistant")


def test_looking_always_earns_the_reward_and_guessing_rarely():
    rng = random.Random(0)
    num_right = 0
    for question in QUESTIONS:
        assert accuracy(written(make_right_answer(question)), (question.answer,)).correct
        guess = written(make_guess(question, rng))
        assert GUESS_THOUGHT in guess and "tool_call" not in guess
        num_right += accuracy(guess, (question.answer,)).correct
    assert 8 < num_right < 32


def test_about_half_guess_and_images_are_as_many_as_markers():
    rows = make_demonstrations(QUESTIONS, num_demonstrations=600, seed=0)
    assert len(rows) == 600
    guesses = sum(GUESS_THOUGHT in row["messages"][1]["content"] for row in rows)
    assert 250 < guesses < 350
    for row in rows:
        markers = sum(item["content"].count("<image>") for item in row["messages"])
        assert markers == len(row["images"]) == 1 + (len(row["messages"]) == 4)


def test_the_call_is_read_by_the_protocol_and_answered_by_the_tool(tmp_path):
    write_preprocessor_config(tmp_path, max_pixels=MODEL_SIZE**2)
    processor = ImageProcessor(tmp_path)
    picture = QUESTIONS[0].picture.draw()
    tool = ZoomTool(ZoomToolConfig(enabled=True, min_side=MODEL_SIZE))
    for place in Place:
        (call,) = HermesProtocol(("zoom",)).parse_calls(format_zoom_call(place))
        assert call == ToolCall(tool="zoom", arguments={"image": 1, "box": list(place.box)})
        shown: list[ImageInput] = [processor.measure(picture)]
        answer = asyncio.run(tool.execute(None, call.arguments, {"images": shown}))
        assert answer.text == format_zoom_answer(place)
        ours, theirs = (
            processor.load(processor.measure(data)).pixels_HWC
            for data in (crop_quarter(picture, place), answer.images[0])
        )
        assert (ours == theirs).all()
