r"""Demonstrations for supervised fine-tuning: chat messages with exact token spans and loss masks.

The table has a column `messages`, and optionally `tools`, the function schemas that the chat
template renders, as in RL data. The messages before the first assistant message form the prompt,
which is rendered by the chat template. Each later message is encoded on its own, exactly as a
rollout would extend the context:

* `assistant`: trained on. The eos token follows, which is trained on too, unless a `tool` message
  follows.
* `tool`: appended to the assistant's turn verbatim (for ARPO's tags the text is
  ` <result>\n...\n</result>`), not trained on.
* `user`, `system`: a new turn through the chat template, not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.data.index_stream import ShuffledIndexStream
from mega_agentrl.data.rl_dataset import parse_tool_schemas, validate_messages
from mega_agentrl.data.table_reader import read_rows
from mega_agentrl.types.records import Message

if TYPE_CHECKING:
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.protocols import ChatCodec


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


def read_conversations(path: str | Path, *, key: str = "sft.train_data") -> list[Conversation]:
    """Read a parquet or JSONL table of chat messages.

    Args:
        path: the file.
        key: configuration key of the path, for error messages.

    Raises:
        ValueError: the file cannot be read or a row has no valid messages.
    """
    conversations = []
    for row in read_rows(path, key=key, columns=("messages",)):
        where = f"{key}={path} {row.place}"
        messages = validate_messages(row.values["messages"], f"{where}, column messages")
        schemas = parse_tool_schemas(row.values.get("tools"), f"{where}, column tools")
        conversations.append(Conversation(messages, schemas, where))
    return conversations


def encode_demonstrations(
    conversations: Sequence[Conversation], codec: ChatCodec, *, max_tokens: int | None = None
) -> list[Demonstration]:
    """Tokenize conversations.

    Raises:
        ValueError: a conversation does not start with a question and end with the assistant, or has
            more than `max_tokens` tokens.
    """
    demonstrations: list[Demonstration] = []
    for conversation in conversations:
        where = conversation.location
        demonstration = encode_demonstration(
            conversation.messages, codec, where, conversation.tool_schemas
        )
        num_tokens = len(demonstration.prompt_ids) + len(demonstration.response_ids)
        if max_tokens is not None and num_tokens > max_tokens:
            raise ValueError(
                f"{where}: the conversation has {num_tokens} tokens, expected at most "
                f"{max_tokens}; shorten it or raise the limit"
            )
        demonstrations.append(demonstration)
    return demonstrations


def encode_demonstration(
    messages: Sequence[Message],
    codec: ChatCodec,
    where: str,
    tool_schemas: Sequence[Mapping[str, Any]] = (),
) -> Demonstration:
    """Tokenize one conversation, which `where` names in errors, with its function schemas."""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[1:] or roles[-1] != "assistant":
        raise ValueError(
            f"{where}: got roles {roles}, expected a question first and an assistant message last"
        )
    start = roles.index("assistant")
    response: list[int] = []
    mask: list[int] = []
    index = start
    while index < len(messages):
        if roles[index] == "assistant":
            ids = codec.encode(messages[index]["content"])
            index += 1
            if index == len(messages) or roles[index] != "tool":
                ids.append(codec.eos_id)
            mask_value = 1
        elif roles[index] == "tool":
            ids, mask_value = codec.encode(messages[index]["content"]), 0
            index += 1
        else:
            stop = roles.index("assistant", index)
            ids, mask_value = codec.encode_next_turn(messages[index:stop]), 0
            index = stop
        response.extend(ids)
        mask.extend([mask_value] * len(ids))
    prompt_ids = tuple(codec.apply_chat_template(messages[:start], list(tool_schemas) or None))
    return Demonstration(prompt_ids, tuple(response), tuple(mask))


class DemonstrationSampler:
    """Draws endless, seeded, resumable batches of demonstrations."""

    def __init__(self, demonstrations: Sequence[Demonstration], seed: int) -> None:
        self._demonstrations = tuple(demonstrations)
        self._stream = ShuffledIndexStream(len(self._demonstrations), seed)

    def next_batch(self, batch_size: int) -> TrainBatch:
        """Return the next batch for `Policy.sft_step`."""
        return collate_demonstrations(
            [self._demonstrations[index] for index in self._stream.take(batch_size)]
        )

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
    )
