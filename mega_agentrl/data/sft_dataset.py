r"""Demonstrations for supervised fine-tuning: chat messages with exact token spans and loss masks.

The table has a column `messages`, and optionally, as in RL data, `tools`, the function schemas that
the chat template renders, and `data.image_key`, the images of all messages. The messages before the
first assistant message form the prompt, which is rendered by the chat template. Each later message
is encoded on its own, exactly as a rollout would extend the context:

* `assistant`: trained on. The eos token follows, which is trained on too, unless a `tool` message
  follows. With `rollout.call_protocol=hermes`, `tool_calls` of the message become the text of the
  calls; with the tag protocol a message has its calls in its text.
* `tool`: with the tag protocol appended to the assistant's turn verbatim (for ARPO's tags the text
  is ` <result>\n...\n</result>`); with `rollout.call_protocol=hermes` a new turn through the chat
  template. Not trained on.
* `user`, `system`: a new turn through the chat template, not trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.data.chat_messages import validate_messages
from mega_agentrl.data.index_stream import ShuffledIndexStream
from mega_agentrl.data.rl_dataset import parse_tool_schemas, refuse_images
from mega_agentrl.data.table_reader import read_rows
from mega_agentrl.errors import InputError
from mega_agentrl.types.records import Message
from mega_agentrl.vision.placeholders import (
    content_parts,
    content_text,
    image_parts,
    locate_images,
)

if TYPE_CHECKING:
    from mega_agentrl.data.prompt_images import PromptImageReader
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.images import PlacedImage
    from mega_agentrl.types.protocols import ChatCodec
    from mega_agentrl.vision.processor import ImageTokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation before tokenization."""

    messages: tuple[Message, ...]
    """The chat messages of the row."""
    tool_schemas: tuple[Mapping[str, Any], ...]
    """The function schemas that the chat template renders."""
    location: str
    """Setting, file and row, for error messages."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A tokenized conversation."""

    prompt_ids: tuple[int, ...]
    """Token ids of the prompt with the generation prompt."""
    response_ids: tuple[int, ...]
    """Token ids of everything after the prompt."""
    loss_mask: tuple[int, ...]
    """1 for each response token that the assistant wrote, else 0."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the conversation; starts count its tokens, prompt and response."""


def read_conversations(
    path: str | Path,
    *,
    key: str = "sft.train_data",
    images: PromptImageReader | None = None,
    config: DataConfig | None = None,
) -> list[Conversation]:
    """Read a parquet or JSONL table of chat messages.

    Args:
        path: the file.
        key: configuration key of the path, for error messages.
        images: reads the images of the rows; None for a model of text, which refuses them.
        config: names of the columns of images; by default those of the schema.

    Raises:
        ValueError: the file cannot be read, a row has no valid messages, or an image cannot be
            used.
    """
    conversations = []
    for row in read_rows(path, key=key, columns=("messages",)):
        where = f"{key}={path} {row.place}"
        messages = validate_messages(
            row.values["messages"], f"{where}, column messages", with_parts=images is not None
        )
        if images is None:
            refuse_images(row.values, where, config or DataConfig())
        else:
            messages = images.attach(messages, row.values, where, Path(path).parent)
        schemas = parse_tool_schemas(row.values.get("tools"), f"{where}, column tools")
        conversations.append(Conversation(messages, schemas, where))
    if images is not None:
        images.verify()
    return conversations


def encode_demonstrations(
    conversations: Sequence[Conversation],
    codec: ChatCodec,
    *,
    max_tokens: int | None = None,
    tool_messages: bool = False,
) -> list[Demonstration]:
    """Tokenize conversations.

    Args:
        conversations: the conversations.
        codec: the tokenizer.
        max_tokens: maximum length of a conversation; None is unlimited.
        tool_messages: whether tools' answers are turns of the chat template, as with
            `rollout.call_protocol=hermes`, or follow the assistant's text.

    Raises:
        ValueError: a conversation does not start with a question and end with the assistant, or has
            more than `max_tokens` tokens.
    """
    demonstrations: list[Demonstration] = []
    for conversation in conversations:
        where = conversation.location
        demonstration = encode_demonstration(
            conversation.messages,
            codec,
            where,
            conversation.tool_schemas,
            tool_messages=tool_messages,
        )
        num_tokens = len(demonstration.prompt_ids) + len(demonstration.response_ids)
        if max_tokens is not None and num_tokens > max_tokens:
            expected = f"at most {max_tokens}; shorten the conversation or raise the limit"
            raise InputError(where, f"{num_tokens} tokens", expected)
        demonstrations.append(demonstration)
    return demonstrations


def encode_demonstration(
    messages: Sequence[Message],
    codec: ChatCodec,
    where: str,
    tool_schemas: Sequence[Mapping[str, Any]] = (),
    *,
    tool_messages: bool = False,
) -> Demonstration:
    """Tokenize one conversation, which `where` names in errors, with its function schemas."""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[1:] or roles[-1] != "assistant":
        expected = "the roles of a conversation: a question first and an assistant message last"
        raise InputError(where, roles, expected)
    start = roles.index("assistant")
    response: list[int] = []
    mask: list[int] = []
    for span in _response_spans(roles, start, tool_messages=tool_messages):
        first = messages[span.start]
        if roles[span.start] == "assistant":
            ids = codec.encode(_assistant_text(first, where, tool_messages=tool_messages))
            is_followed_inline = span.stop < len(roles) and roles[span.stop] == "tool"
            if not is_followed_inline or tool_messages:
                ids.append(codec.eos_id)
        elif roles[span.start] == "tool" and not tool_messages:
            ids = _encode_inline(first, codec)
        else:
            ids = codec.encode_next_turn(messages[span])
        response.extend(ids)
        mask.extend([int(roles[span.start] == "assistant")] * len(ids))
    prompt_ids = tuple(codec.apply_chat_template(messages[:start], list(tool_schemas) or None))
    images, tokens = image_parts(messages), _image_tokens(codec)
    placed = locate_images((*prompt_ids, *response), images, tokens.image_id) if tokens else ()
    return Demonstration(prompt_ids, tuple(response), tuple(mask), placed)


def _response_spans(roles: Sequence[str], start: int, *, tool_messages: bool) -> Iterator[slice]:
    """Yield slices of messages that are encoded together: all messages between two answers."""
    while start < len(roles):
        stop = start + 1
        if roles[start] != "assistant" and (tool_messages or roles[start] != "tool"):
            stop = roles.index("assistant", start)
        yield slice(start, stop)
        start = stop


def _assistant_text(message: Message, where: str, *, tool_messages: bool) -> str:
    if image_parts([message]):
        cause = "a marker <image> in the text of an answer"
        raise InputError(where, "an image in a message of the assistant", "text", cause)
    text, calls = content_text(message["content"]), message.get("tool_calls") or []
    if calls and not tool_messages:
        raise InputError(
            f"{where}, tool_calls",
            [call["function"]["name"] for call in calls],
            "calls in the text of the message, between the tags of their tools",
            "demonstrations for rollout.call_protocol=hermes",
        )
    return "\n".join([*([text] if text else []), *map(_call_text, calls)])


def _call_text(call: Mapping[str, Any]) -> str:
    """Return a call as the policy writes it with `rollout.call_protocol=hermes`."""
    function = {key: call["function"][key] for key in ("name", "arguments")}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def _encode_inline(message: Message, codec: ChatCodec) -> list[int]:
    """Return the ids of a tool's answer within the assistant's turn."""
    ids: list[int] = []
    for part in content_parts(message["content"]):
        if part["type"] == "text":
            ids += codec.encode(part["text"])
        else:
            tokens = _image_tokens(codec)
            assert tokens is not None, "the prompt's images were refused before"
            ids += tokens.placeholder_ids(part["image"])
    return ids


def _image_tokens(codec: ChatCodec) -> ImageTokens | None:
    return getattr(codec, "image_tokens", None)


class DemonstrationSampler:
    """Draws endless, seeded, resumable batches of demonstrations.

    Args:
        demonstrations: the tokenized conversations.
        seed: seed of the order.
        load_images: returns images with their pixels; needed if there are any.
    """

    def __init__(
        self,
        demonstrations: Sequence[Demonstration],
        seed: int,
        load_images: Callable[[Sequence[PlacedImage]], tuple[PlacedImage, ...]] | None = None,
    ) -> None:
        self._demonstrations = tuple(demonstrations)
        self._load_images = load_images
        self._stream = ShuffledIndexStream(len(self._demonstrations), seed)

    def next_batch(self, batch_size: int) -> TrainBatch:
        """Return the next batch for `Policy.sft_step`."""
        batch = [self._demonstrations[index] for index in self._stream.take(batch_size)]
        if self._load_images is not None:
            batch = [replace(item, images=self._load_images(item.images)) for item in batch]
        return collate_demonstrations(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON values."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where the state was saved."""
        self._stream.load_state_dict(state)


def collate_demonstrations(demonstrations: Sequence[Demonstration]) -> TrainBatch:
    """Pad demonstrations to a batch without rewards and log-probs, each in its own group."""
    import torch

    from mega_agentrl.types.batch import TrainBatch

    num_rows = len(demonstrations)
    num_positions = max(len(item.response_ids) for item in demonstrations)
    response_BT = torch.zeros(num_rows, num_positions, dtype=torch.int64)
    mask_BT = torch.zeros(num_rows, num_positions, dtype=torch.bool)
    for row, item in enumerate(demonstrations):
        length = len(item.response_ids)
        response_BT[row, :length] = torch.tensor(item.response_ids)
        mask_BT[row, :length] = torch.tensor(item.loss_mask, dtype=torch.bool)
    zeros_BT = torch.zeros(num_rows, num_positions)
    images_B = tuple(item.images for item in demonstrations)
    return TrainBatch(
        prompt_ids=tuple(item.prompt_ids for item in demonstrations),
        response_BT=response_BT,
        length_B=torch.tensor([len(item.response_ids) for item in demonstrations]),
        mask_BT=mask_BT,
        group_B=torch.arange(num_rows),
        reward_B=torch.zeros(num_rows),
        tree_token_BT=torch.arange(num_rows * num_positions).view(num_rows, num_positions),
        rollout_logp_BT=zeros_BT,
        rollout_entropy_BT=zeros_BT.clone(),
        version_BT=torch.zeros(num_rows, num_positions, dtype=torch.int64),
        images_B=images_B if any(images_B) else None,
    )
