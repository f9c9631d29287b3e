"""Encoding of tool answers and user messages into the token buffer of a trajectory.

With the tag protocol tool answers continue the assistant's turn. Otherwise they are, like user
messages, chat messages after it: the text that the chat template puts between two assistant turns,
ending in the generation prompt. A turn without its end-of-turn token gets one first. All of these
tokens have loss mask 0.

With `rollout.use_inference_chat_template` the next turn is sampled after the template's rendering
of the whole conversation, and the trajectory records a `ContextReset`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mega_agentrl.rollout.conversation.messages import (
    build_messages,
    template_drift,
    tool_message,
    user_message,
)
from mega_agentrl.rollout.conversation.tool_calls import truncate_to_fit
from mega_agentrl.types.protocols import ChatCodec
from mega_agentrl.types.records import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
    from mega_agentrl.rollout.generation.turn_generator import TurnGenerator
    from mega_agentrl.types.records import Message, Prompt, ToolOutcome

    OutcomeEncoder = Callable[[Sequence[ToolOutcome]], tuple[list[int], list[str]]]

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
        """The conversation so far."""
        in_chat = self._context.tools.uses_tool_messages
        return build_messages(self._prompt, self._token_buffer.turns, in_chat=in_chat)

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
            texts = [self._context.tools.render_outcome(outcome) for outcome in shown]
            pairs = zip(shown, texts, strict=True)
            return self._encode_next_turn([tool_message(*pair) for pair in pairs], ended), texts

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
        fitting = truncate_to_fit(outcomes, self._turn_generator.num_tokens_left, write)
        if fitting is None:
            self.write_hidden_outcomes(outcomes, role)
            return False
        token_ids, texts = fitting
        for outcome, text in zip(outcomes[:-1], texts[:-1], strict=True):
            self._token_buffer.append_observation((), text, outcome, role)
        self._token_buffer.append_observation(token_ids, texts[-1], outcomes[-1], role)
        if self._context.config.use_inference_chat_template and write != self._encode_inline:
            tools = self._prompt.tool_schemas or None
            self._turn_generator.replace_context(
                self._codec.apply_chat_template(self.messages, tools)
            )
        return True

    def _encode_inline(self, outcomes: Sequence[ToolOutcome]) -> tuple[list[int], list[str]]:
        texts = [self._context.tools.render_outcome(outcome) for outcome in outcomes]
        return self._context.codec.encode("".join(texts)), texts

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
