"""Demonstrations for supervised training: a table of chat messages, as exact token spans.

Column `messages`. Messages before the first assistant message form the prompt, through the
chat template. After that each message is encoded by itself, piece by piece as a rollout
would build the same context:

* `assistant`: trained on. Eos follows it, trained on too, unless a `tool` message follows.
* `tool`: appended to the assistant's turn exactly as it stands (for ARPO's tags the text is
  ` <result>\\n...\\n</result>`), not trained on.
* `user`, `system`: a new turn, through the chat template, not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mega_agentrl.data.dataset import check_messages
from mega_agentrl.data.shuffle import ShuffledStream
from mega_agentrl.data.table import read_rows
from mega_agentrl.types.records import Message

if TYPE_CHECKING:
    from mega_agentrl.types.batch import TrainBatch


class TurnEncoder(Protocol):
    """The part of `HFCodec` that demonstrations need."""

    @property
    def eos_id(self) -> int:
        """The id that ends an assistant turn."""

    def encode(self, text: str) -> list[int]:
        """Token ids of exactly this text."""

    def apply_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Ids of the conversation followed by the generation prompt."""

    def apply_next_turn(self, messages: Sequence[Message]) -> list[int]:
        """Ids between an assistant turn's eos and the next assistant turn."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The chat messages of a row."""

    messages: tuple[Message, ...]
    where: str
    """The setting, the file and the row, for errors."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation. mask: per response token, 1 where the assistant wrote it."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    mask: tuple[int, ...]


def load_demonstrations(
    path: str | Path,
    codec: TurnEncoder,
    *,
    key: str = "sft.data",
    max_tokens: int | None = None,
) -> list[Demonstration]:
    """Read and tokenize a table: `read_conversations`, then `encode_demonstrations`."""
    return encode_demonstrations(read_conversations(path, key=key), codec, max_tokens=max_tokens)


def read_conversations(path: str | Path, *, key: str = "sft.data") -> list[Conversation]:
    """Read a table of chat messages, parquet or JSONL; `key` is its setting.

    Raises ValueError, see `read_rows` and `check_messages`.
    """
    conversations = []
    for number, row in enumerate(read_rows(path, key=key, columns=("messages",))):
        where = f"{key}={path} row {number}"
        messages = check_messages(row["messages"], f"{where}, column messages")
        conversations.append(Conversation(messages, where))
    return conversations


def encode_demonstrations(
    conversations: Sequence[Conversation], codec: TurnEncoder, *, max_tokens: int | None = None
) -> list[Demonstration]:
    """Tokenize conversations.

    Raises ValueError for one that does not end with the assistant or has more than `max_tokens`
    tokens in all.
    """
    demonstrations: list[Demonstration] = []
    for conversation in conversations:
        where = conversation.where
        demonstration = encode_demonstration(conversation.messages, codec, where)
        num_tokens = len(demonstration.prompt_ids) + len(demonstration.response_ids)
        if max_tokens is not None and num_tokens > max_tokens:
            raise ValueError(
                f"{where}: the conversation has {num_tokens} tokens, expected at most "
                f"{max_tokens}; shorten it or raise the limit"
            )
        demonstrations.append(demonstration)
    return demonstrations


def encode_demonstration(
    messages: Sequence[Message], codec: TurnEncoder, where: str
) -> Demonstration:
    """The token spans of one conversation; `where` names it in errors."""
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
            trained = 1
        elif roles[index] == "tool":
            ids, trained = codec.encode(messages[index]["content"]), 0
            index += 1
        else:
            stop = roles.index("assistant", index)
            ids, trained = codec.apply_next_turn(messages[index:stop]), 0
            index = stop
        response.extend(ids)
        mask.extend([trained] * len(ids))
    prompt_ids = tuple(codec.apply_chat(messages[:start]))
    return Demonstration(prompt_ids, tuple(response), tuple(mask))


class DemonstrationSampler:
    """Seeded, endless, resumable batches of demonstrations."""

    def __init__(self, demonstrations: Sequence[Demonstration], seed: int) -> None:
        self._demonstrations = tuple(demonstrations)
        self._stream = ShuffledStream(len(self._demonstrations), seed)

    def next(self, batch_size: int) -> TrainBatch:
        """The next batch, ready for `Policy.supervise`."""
        return to_batch([self._demonstrations[index] for index in self._stream.take(batch_size)])

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes back."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the state was taken."""
        self._stream.load_state_dict(state)


def to_batch(demonstrations: Sequence[Demonstration]) -> TrainBatch:
    """A batch without rewards or log-probs; every demonstration is a group of its own."""
    import torch

    from mega_agentrl.types.batch import TrainBatch

    num_rows = len(demonstrations)
    num_positions = max(len(item.response_ids) for item in demonstrations)
    response_BT = torch.zeros(num_rows, num_positions, dtype=torch.int64)
    mask_BT = torch.zeros(num_rows, num_positions, dtype=torch.bool)
    for row, item in enumerate(demonstrations):
        length = len(item.response_ids)
        response_BT[row, :length] = torch.tensor(item.response_ids)
        mask_BT[row, :length] = torch.tensor(item.mask, dtype=torch.bool)
    zeros_BT = torch.zeros(num_rows, num_positions)
    return TrainBatch(
        prompt_ids=tuple(item.prompt_ids for item in demonstrations),
        response_BT=response_BT,
        length_B=torch.tensor([len(item.response_ids) for item in demonstrations]),
        mask_BT=mask_BT,
        group_B=torch.arange(num_rows),
        reward_B=torch.zeros(num_rows),
        node_BT=torch.arange(num_rows * num_positions).view(num_rows, num_positions),
        rollout_logp_BT=zeros_BT,
        rollout_entropy_BT=zeros_BT.clone(),
        version_BT=torch.zeros(num_rows, num_positions, dtype=torch.int64),
    )
