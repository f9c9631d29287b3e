"""Encoding of tool answers and user messages into the token buffer of a trajectory.

With the tag protocol tool answers continue the assistant's turn. Otherwise they are, like user
messages, chat messages after it: the text that the chat template puts between two assistant turns,
ending in the generation prompt. A turn without its end-of-turn token gets one first. Images of an
answer come before its text; the text of the turn has labels in their place. All of these tokens
have loss mask 0.

The generation prompt may open the reasoning of the next turn. The text of such a turn is read with
the opening before it (`opened_reasoning`).

With `rollout.use_inference_chat_template` the next turn is sampled after the template's rendering
of the whole conversation, and the trajectory records a `ContextReset`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mega_agentrl.rollout.conversation.messages import (
    build_messages,
    template_drift,
    tool_message,
    user_message,
)
from mega_agentrl.rollout.conversation.tool_calls import truncate_to_fit
from mega_agentrl.tool.call_protocol.hermes import opened_reasoning
from mega_agentrl.types.images import ImageInput
from mega_agentrl.types.protocols import ChatCodec
from mega_agentrl.types.records import Role
from mega_agentrl.vision.placeholders import content_text, image_label, split_at_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
    from mega_agentrl.rollout.generation.turn_generator import TurnGenerator
    from mega_agentrl.types.protocols import ImageLoader
    from mega_agentrl.types.records import Message, Prompt, ToolOutcome

    OutcomeEncoder = Callable[[Sequence[ToolOutcome]], tuple[list[int], list[str]]]

_NUM_OPENING_TOKENS = 16
"""Tokens before a turn that are searched for the opening of its reasoning."""

_log = logging.getLogger(__name__)


class ConversationWriter:
    """Appends tool answers and user messages to the token buffer, as far as they fit."""

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        token_buffer: TokenBuffer,
        turn_generator: TurnGenerator,
    ) -> None:
        self._context = context
        self._prompt = prompt
        self._token_buffer = token_buffer
        self._turn_generator = turn_generator

    @property
    def messages(self) -> list[Message]:
        """The conversation so far as texts, with labels for images."""
        return [
            {**message, "content": content_text(message["content"])}
            for message in self._messages_with_images()
        ]

    def opened_reasoning(self, start: int) -> str:
        """Return the marker with which the context opens the reasoning of a turn, or nothing.

        Args:
            start: First response token of the turn.
        """
        token_ids, first = self._prompt.token_ids, 0
        if resets := self._turn_generator.context_resets:
            token_ids, first = resets[-1].token_ids, resets[-1].start
        before = self._token_buffer.token_ids[max(first, start - _NUM_OPENING_TOKENS) : start]
        last_ids = (*token_ids, *before)[-_NUM_OPENING_TOKENS:]
        return opened_reasoning(self._codec.decode_with_special_tokens(last_ids))

    def write_tool_answers(self, outcomes: Sequence[ToolOutcome], *, ended: bool) -> bool:
        """Append the answers to the calls of one turn, each as a turn of its own.

        Args:
            outcomes: The outcomes of the calls, in order.
            ended: Whether the assistant's turn has its end-of-turn token.

        Returns:
            False if the answers do not fit; the outcomes are then recorded without tokens.
        """
        if not self._context.tools.uses_tool_messages:
            return self._write_turns(Role.tool, outcomes, self._encode_inline)

        def encode_as_messages(shown: Sequence[ToolOutcome]) -> tuple[list[int], list[str]]:
            texts = [self._render(outcome) for outcome in shown]
            messages = [
                tool_message(outcome, self._split(outcome, text) if outcome.images else text)
                for outcome, text in zip(shown, texts, strict=True)
            ]
            return self._encode_next_turn(messages, ended), texts

        return self._write_turns(Role.tool, outcomes, encode_as_messages)

    def write_user_message(self, outcome: ToolOutcome) -> bool:
        """Append the user's message.

        Returns:
            False if it does not fit; the outcome is then recorded without tokens.
        """

        def encode_as_message(shown: Sequence[ToolOutcome]) -> tuple[list[int], list[str]]:
            text = shown[0].answer
            return self._encode_next_turn([user_message(text)], ended=True), [text]

        return self._write_turns(Role.user, [outcome], encode_as_message)

    def write_hidden_outcomes(
        self, outcomes: Sequence[ToolOutcome], role: Role = Role.tool
    ) -> None:
        """Record outcomes, without tokens, that are not shown to the policy."""
        for outcome in outcomes:
            self._token_buffer.append_observation((), "", outcome, role)

    def check_template_drift(self) -> str:
        """Compare the trajectory with the chat template's rendering of the conversation.

        The first difference of a pass is logged; `rollout/template_drift_fraction` counts all.

        Returns:
            The difference; empty if there is none or if there is nothing to compare.
        """
        context, turns = self._context, self._token_buffer.turns
        has_chat_messages = Role.user in {turn.role for turn in turns if turn.text} or (
            context.tools.uses_tool_messages and any(turn.role is Role.tool for turn in turns)
        )
        if not has_chat_messages or context.config.use_inference_chat_template:
            return ""
        drift = template_drift(
            self._prompt,
            self._token_buffer.token_ids,
            turns,
            self._codec,
            context.config.template_check,
            [placed.image for placed in self._token_buffer.images],
            in_chat=context.tools.uses_tool_messages,
        )
        if drift and "template" not in context.emitted_warnings:
            context.emitted_warnings.add("template")
            _log.warning(
                "%s: the chat template renders this conversation differently (further cases are "
                "counted as rollout/template_drift_fraction): %s",
                self._turn_generator.trajectory_id,
                drift,
            )
        return drift

    def _write_turns(
        self, role: Role, outcomes: Sequence[ToolOutcome], write: OutcomeEncoder
    ) -> bool:
        images = [image for outcome in outcomes for image in self._images(outcome)]
        num_image_tokens = sum(image.num_tokens for image in images)
        room = self._turn_generator.num_tokens_left
        fitting = truncate_to_fit(outcomes, room, write, num_image_tokens)
        if fitting is None:
            self.write_hidden_outcomes(outcomes, role)
            return False
        token_ids, texts = fitting
        for outcome, text in zip(outcomes[:-1], texts[:-1], strict=True):
            self._token_buffer.append_observation((), text, outcome, role)
        placed = self._image_loader.locate(token_ids, images) if images else ()
        self._token_buffer.append_observation(token_ids, texts[-1], outcomes[-1], role, placed)
        if self._context.config.use_inference_chat_template and write != self._encode_inline:
            self._replace_context()
        return True

    def _replace_context(self) -> None:
        """Continue after the template's rendering of the whole conversation."""
        tools = self._prompt.tool_schemas or None
        token_ids = self._codec.apply_chat_template(self._messages_with_images(), tools)
        images = [placed.image for placed in (*self._prompt.images, *self._token_buffer.images)]
        placed = self._image_loader.locate(token_ids, images) if images else ()
        self._turn_generator.replace_context(token_ids, placed)

    def _messages_with_images(self) -> list[Message]:
        images = [placed.image for placed in self._token_buffer.images]
        in_chat = self._context.tools.uses_tool_messages
        return build_messages(self._prompt, self._token_buffer.turns, images, in_chat=in_chat)

    def _encode_inline(self, outcomes: Sequence[ToolOutcome]) -> tuple[list[int], list[str]]:
        encode = self._context.codec.encode
        texts = [self._render(outcome) for outcome in outcomes]
        if not any(outcome.images for outcome in outcomes):
            return encode("".join(texts)), texts
        token_ids: list[int] = []
        for outcome, text in zip(outcomes, texts, strict=True):
            for part in self._split(outcome, text):
                if part["type"] == "text":
                    token_ids += encode(part["text"])
                else:
                    token_ids += self._image_loader.placeholder_ids(part["image"])
        return token_ids, texts

    def _render(self, outcome: ToolOutcome) -> str:
        """Return the text of an outcome, with labels of its images before the answer."""
        labels = "".join(image_label(image) for image in self._images(outcome))
        if labels:
            outcome = replace(outcome, answer=labels + outcome.answer)
        return self._context.tools.render_outcome(outcome)

    def _split(self, outcome: ToolOutcome, text: str) -> list[dict[str, Any]]:
        return split_at_labels(text, self._images(outcome))

    def _images(self, outcome: ToolOutcome) -> list[ImageInput]:
        images = [image for image in outcome.images if isinstance(image, ImageInput)]
        assert len(images) == len(outcome.images), "images that `check_answers` has not seen"
        return images

    @property
    def _image_loader(self) -> ImageLoader:
        loader = self._context.images
        assert loader is not None, "images in an answer to a model of text"
        return loader

    def _encode_next_turn(self, messages: Sequence[Message], ended: bool) -> list[int]:
        codec = self._codec
        return [*([] if ended else [codec.eos_id]), *codec.encode_next_turn(messages)]

    @property
    def _codec(self) -> ChatCodec:
        codec = self._context.codec
        if not isinstance(codec, ChatCodec):
            raise TypeError(
                f"codec: got {type(codec).__name__}, expected one with a chat template; tools "
                "called by JSON and simulated users need it"
            )
        return codec
