"""What others say to the policy becomes tokens of its trajectory.

Tools answer inside of the assistant's turn (tags) or, like the simulated user, in chat messages
behind it: the pieces that the chat template puts between two assistant turns, with the
generation prompt at the end. A turn that ended without its end-of-turn token gets one in
front of the piece. All of this has loss mask 0.

With `use_inference_chat_template` the next turn is sampled behind the template's rendering of
everything said so far; the trajectory then notes a restart (`records.Restart`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mega_agentrl.rollout.answers import fit
from mega_agentrl.rollout.conversation import (
    messages_of,
    template_drift,
    tool_message,
    user_message,
)
from mega_agentrl.types.ports import ChatCodec
from mega_agentrl.types.records import Author

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.rollout.speech import Speech
    from mega_agentrl.rollout.tape import Tape
    from mega_agentrl.types.records import Message, Prompt, ToolOutcome

    Writer = Callable[[Sequence[ToolOutcome]], tuple[list[int], list[str]]]

_log = logging.getLogger(__name__)


class Dialogue:
    """Writes to the tape what tools and user say, as far as it fits."""

    def __init__(self, context: RolloutContext, prompt: Prompt, tape: Tape, speech: Speech) -> None:
        self._context = context
        self._prompt = prompt
        self._tape = tape
        self._speech = speech

    @property
    def messages(self) -> list[Message]:
        """Everything said so far."""
        in_chat = self._context.tools.answers_in_chat
        return messages_of(self._prompt, self._tape.turns, in_chat=in_chat)

    def answer(self, outcomes: Sequence[ToolOutcome], *, ended: bool) -> bool:
        """The tools' answers to one turn, a turn each; False: there is no room, notes are left.

        ended: the assistant's turn has its end-of-turn token.
        """
        if not self._context.tools.answers_in_chat:
            return self._write(Author.tool, outcomes, self._inline)

        def in_chat(shown: Sequence[ToolOutcome]) -> tuple[list[int], list[str]]:
            texts = [self._context.tools.render(outcome) for outcome in shown]
            pairs = zip(shown, texts, strict=True)
            return self._next_turn([tool_message(*pair) for pair in pairs], ended), texts

        return self._write(Author.tool, outcomes, in_chat)

    def reply(self, outcome: ToolOutcome) -> bool:
        """The user's message; False: there is no room, a note is left."""

        def as_message(shown: Sequence[ToolOutcome]) -> tuple[list[int], list[str]]:
            text = shown[0].answer
            return self._next_turn([user_message(text)], ended=True), [text]

        return self._write(Author.user, [outcome], as_message)

    def note(self, outcomes: Sequence[ToolOutcome], author: Author = Author.tool) -> None:
        """Keep outcomes that the policy is not shown."""
        for outcome in outcomes:
            self._tape.add_tool((), "", outcome, author)

    def drift(self) -> str:
        """How the full chat template differs from the trajectory; "" where it was not needed.

        Said once per `collect`; the metrics count the rest.
        """
        context, turns = self._context, self._tape.turns
        chatted = Author.user in {turn.author for turn in turns if turn.text} or (
            context.tools.answers_in_chat and any(turn.author is Author.tool for turn in turns)
        )
        if not chatted or context.config.use_inference_chat_template:
            return ""
        found = template_drift(
            self._prompt,
            self._tape.token_ids,
            turns,
            self._codec,
            context.config.template_check,
            in_chat=context.tools.answers_in_chat,
        )
        if found and "template" not in context.warned:
            context.warned.add("template")
            _log.warning(
                "%s: the chat template makes something else of this conversation (others are "
                "counted as rollout/template_drift): %s",
                self._speech.trajectory_id,
                found,
            )
        return found

    def _write(self, author: Author, outcomes: Sequence[ToolOutcome], write: Writer) -> bool:
        fitting = fit(outcomes, self._speech.room, write)
        if fitting is None:
            self.note(outcomes, author)
            return False
        token_ids, texts = fitting
        for outcome, text in zip(outcomes[:-1], texts[:-1], strict=True):
            self._tape.add_tool((), text, outcome, author)
        self._tape.add_tool(token_ids, texts[-1], outcomes[-1], author)
        if self._context.config.use_inference_chat_template and write != self._inline:
            tools = self._prompt.tool_schemas or None
            self._speech.restart(self._codec.apply_chat(self.messages, tools))
        return True

    def _inline(self, outcomes: Sequence[ToolOutcome]) -> tuple[list[int], list[str]]:
        texts = [self._context.tools.render(outcome) for outcome in outcomes]
        return self._context.codec.encode("".join(texts)), texts

    def _next_turn(self, messages: Sequence[Message], ended: bool) -> list[int]:
        codec = self._codec
        return [*([] if ended else [codec.eos_id]), *codec.apply_next_turn(messages)]

    @property
    def _codec(self) -> ChatCodec:
        codec = self._context.codec
        if not isinstance(codec, ChatCodec):
            raise TypeError(
                f"codec: got {type(codec).__name__}, expected one with a chat template; tools "
                "called by JSON and simulated users speak through it"
            )
        return codec
