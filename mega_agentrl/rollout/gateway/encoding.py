"""Token ids of messages, for a context that grows block by block.

The first block is rendered by the chat template together with the tools. Each later block is what
the template writes between two messages of the assistant, as in `rollout.conversation.writer`. The
answers of tools are untrusted: control tags in them are escaped as in the answers of the run's own
tools.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from mega_agentrl.rollout.gateway.chat import ErrorKind, GatewayError
from mega_agentrl.rollout.gateway.work_threads import thread_copy
from mega_agentrl.tool.call_protocol.hermes import opened_reasoning, split_reasoning
from mega_agentrl.tool.call_protocol.json_call import format_call
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import AssistantText, ToolOutcome, ToolStatus
from mega_agentrl.vision.placeholders import content_parts, content_text, image_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mega_agentrl.rollout.gateway.capture import Block
    from mega_agentrl.types.images import PlacedImage
    from mega_agentrl.types.protocols import ChatCodec, ImageLoader, ToolProvider
    from mega_agentrl.types.records import Message, ToolCall


_NUM_PROMPT_END_TOKENS = 8
"""Tokens at the end of a block in which the generation prompt may open the reasoning."""


class BlockEncoder:
    """Encodes blocks of messages with the chat template of the policy."""

    def __init__(self, codec: ChatCodec, tools: ToolProvider, images: ImageLoader | None) -> None:
        self._shared_codec = codec
        self._tools = tools
        self._images = images

    @property
    def _codec(self) -> ChatCodec:
        return thread_copy(self._shared_codec)

    def encode_first(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        """Return ids and images of the tools and the first messages, with a generation prompt.

        Raises:
            GatewayError: the chat template cannot render them.
        """
        shown = [self._shown(message) for message in messages]
        return self._locate(
            shown,
            lambda: self._codec.apply_chat_template(shown, tools or None, variables=variables),
        )

    def encode_next(
        self,
        messages: Sequence[Message],
        previous_ids: Sequence[int],
        variables: Mapping[str, Any],
    ) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        """Return ids and images of messages after an answer, with a generation prompt.

        An answer `previous_ids` without its end-of-turn token gets one first.

        Raises:
            GatewayError: the chat template cannot render them.
        """
        shown = [self._shown(message) for message in messages]
        eos_id = self._codec.eos_id
        end = [] if previous_ids and previous_ids[-1] == eos_id else [eos_id]
        return self._locate(shown, lambda: [*end, *self._codec.encode_next_turn(shown, variables)])

    def encode_assistant(self, content: Any, calls: Sequence[ToolCall]) -> tuple[int, ...]:
        """Return the ids of a message of the assistant that the policy did not sample.

        Raises:
            GatewayError: the chat template cannot render it.
        """

        def encode() -> list[int]:
            text = "\n".join(
                part for part in (content_text(content), *map(format_call, calls)) if part
            )
            return self._codec.encode_assistant_turn(text)

        return self._locate([], encode)[0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens."""
        return self._codec.decode(token_ids)

    def encode_prefill(self, text: str) -> tuple[int, ...]:
        """Return the ids of the beginning of an answer."""
        return tuple(self._codec.encode(text))

    def split_answer(self, block: Block, text: str, *, takes_calls: bool) -> AssistantText:
        """Take the text of an answer apart.

        Args:
            block: The block before the answer.
            text: The text of the sampled tokens.
            takes_calls: Whether calls are taken out of the text. Otherwise the agent, which has
                described its tools in the prompt, reads them there.
        """
        written = text
        text = opened_reasoning(self.decode(block.token_ids[-_NUM_PROMPT_END_TOKENS:])) + text
        if takes_calls:
            parts = self._tools.split_turn(text)
        else:
            reasoning, content = split_reasoning(text)
            parts = AssistantText(reasoning=reasoning, content=content, calls=())
        if not block.prefill or parts.reasoning:
            return parts
        # The client appends the answer to its beginning, so that white space between them counts.
        space = written[: len(written) - len(written.lstrip())]
        return replace(parts, content=space + parts.content)

    def shown_text(self, message: Message) -> str:
        """Return the text of a message as the policy sees it, with labels for images."""
        return content_text(self._shown(message)["content"])

    def _shown(self, message: Message) -> Message:
        """Return a message as the chat template gets it."""
        parts = [
            {"type": "text", "text": self._escape(message["role"], part["text"])}
            if part["type"] == "text"
            else part
            for part in content_parts(message["content"])
        ]
        has_images = any(part["type"] == "image" for part in parts)
        content = parts if has_images else "".join(part["text"] for part in parts)
        return {**message, "content": content}

    def _escape(self, role: str, text: str) -> str:
        if role != "tool":
            return text
        outcome = ToolOutcome(tool="", status=ToolStatus.ok, answer=text, latency_s=0.0)
        return self._tools.render_outcome(outcome)

    def _locate(
        self, messages: Sequence[Message], encode: Callable[[], list[int]]
    ) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        try:
            token_ids = encode()
            images = image_parts(messages)
            placed = self._images.locate(token_ids, images) if self._images and images else ()
        except (TemplateError, TypeError, ValueError, RecursionError, ToolSessionError) as error:
            raise GatewayError(
                ErrorKind.invalid_request,
                f"messages: the model's chat template cannot render them: {error}; probable "
                "cause: roles in an order that the template refuses",
            ) from error
        return tuple(token_ids), placed
