"""The tree of contexts of one session, and the trajectory made of it.

A conversation is a chain of blocks: the first block holds the tools and all messages before the
first one of the assistant, and ends in the generation prompt; then messages of the assistant
alternate with blocks of the messages between them. Each block has the token ids that were sampled
or encoded for it, once. The history of a request is looked up block by block by the keys of its
messages (`matching`), so a known prefix is continued with its ids; the first block that is not
known begins a new branch. Nothing is ever removed.

::

    tools, system, user ── answer ── tool result ── answer ── tool result ── answer
                                          └── answer (the client sent the request again)
    summary of the history ── answer ...                      (the client compacted it)
    tools, system of a sub-agent, task ── answer ...

A request may end with the beginning of the assistant's turn. It is a block of its own, and the
answer behind it is known by the whole text of the turn, as histories have it.

A message of the assistant that is new to its branch has the ids that were sampled for the same
message elsewhere in the session, for example before a compaction, else the template's.

`build_response` lays the tree out as the response of one trajectory. Each sampled token occurs in
it once, after the context that it was sampled in. Where the context is not simply the response
before it, there is a `ContextReset`. Branches follow each other depth first, the one with the
latest answer last. Consecutive branches thus share the longest possible prefix, which training
computes once (`batch.packing`), and a session ends with its last answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from mega_agentrl.rollout.gateway.chat import ErrorKind, GatewayError
from mega_agentrl.rollout.gateway.matching import assistant_key, block_key, prefill_key
from mega_agentrl.rollout.gateway.request_size import (
    num_chars,
    stored_bytes,
)
from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
from mega_agentrl.types.records import ContextReset, Role, ToolOutcome, ToolStatus
from mega_agentrl.types.routes import join_routes
from mega_agentrl.vision.placeholders import image_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from mega_agentrl.rollout.gateway.chat import ChatRequest
    from mega_agentrl.rollout.gateway.encoding import BlockEncoder
    from mega_agentrl.types.images import ImageInput, PlacedImage
    from mega_agentrl.types.records import Generation, Message, Prompt, ToolCall
    from mega_agentrl.types.routes import TokenRoutes


_BYTES_PER_TOKEN = 40
"""Memory of a number in a tuple. A sampled token has four: its id, log-prob, entropy and argmax."""

_BYTES_PER_BLOCK = 1024
"""Memory of a block without tokens."""


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """Consecutive tokens of a context: one message of the assistant, or the messages between."""

    parent: Block | None
    digest: bytes
    """Hash of the keys of all blocks from the first one of the context to this one."""
    token_ids: tuple[int, ...]
    images: tuple[PlacedImage, ...] = ()
    """Images of the block; starts count `token_ids`."""
    messages: tuple[Message, ...] = ()
    """Messages of a block that is not the assistant's."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools of a block that is the first one of its context."""
    prefill: str = ""
    """Text of a block that is the beginning of the answer behind it."""
    answer: Message | None = None
    """Message of a block that is the assistant's, as clients know it."""
    generation: Generation | None = None
    """The sampled tokens and their log-probs; None for a block that was encoded."""
    num_calls: int = 0
    """Number of tool calls in the answer that the client got."""
    children: dict[bytes, Block] = field(default_factory=dict)
    """The block that continues this one, by key; of equal answers the latest."""
    prefilled_answers: dict[bytes, Block] = field(default_factory=dict)
    """Answers whose beginning is a block behind this one, by the key of the whole turn."""
    continuations: list[Block] = field(default_factory=list)
    """All blocks that continue this one, in the order in which they were made."""
    last_order: int = -1
    """Number of the latest answer in the tree below, counted over the session; -1 without one."""
    length: int = field(init=False)
    """Number of tokens of the context up to and including this block."""
    num_bytes: int = field(init=False)
    """About how much memory the block takes, without its images."""

    def __post_init__(self) -> None:
        self.length = len(self.token_ids) + (self.parent.length if self.parent else 0)
        bytes_per_token = _BYTES_PER_TOKEN * (1 if self.generation is None else 4)
        texts = stored_bytes((self.messages, self.tools, self.answer, self.prefill))
        self.num_bytes = _BYTES_PER_BLOCK + bytes_per_token * len(self.token_ids) + texts

    @property
    def is_sampled(self) -> bool:
        """Whether the policy sampled the block in this place."""
        return self.generation is not None

    @property
    def chain(self) -> list[Block]:
        """The blocks from the first one of the context to this one."""
        blocks: list[Block] = []
        block: Block | None = self
        while block is not None:
            blocks.append(block)
            block = block.parent
        return blocks[::-1]

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages up to and including this block."""
        blocks = ((*block.messages, block.answer) for block in self.chain)
        return tuple(message for messages in blocks for message in messages if message is not None)

    @property
    def routes(self) -> list[TokenRoutes]:
        """Routes of consecutive parts of the context up to and including this block."""
        generations = (block.generation for block in self.chain)
        return [
            generation.routes
            for generation in generations
            if generation is not None and generation.routes is not None
        ]

    @property
    def num_routed(self) -> int:
        """Number of leading tokens of the context whose routes are known."""
        return self.routes[-1].stop if self.routes else 0

    def context(self) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        """Return the token ids and the images of the context up to and including this block."""
        token_ids: list[int] = []
        images: list[PlacedImage] = []
        for block in self.chain:
            images += (placed.shifted(len(token_ids)) for placed in block.images)
            token_ids += block.token_ids
        return tuple(token_ids), tuple(images)


class ContextTree:
    """All contexts of a session.

    Args:
        encoder: Encodes messages that have no ids yet.
    """

    def __init__(self, encoder: BlockEncoder) -> None:
        self.roots: list[Block] = []
        """First blocks, in the order in which they were made."""
        self.num_answers = 0
        """Sampled blocks."""
        self.first_answer: Block | None = None
        """The first sampled block."""
        self.num_branches = 0
        """Conversations that part from those before them: rewritten histories and sub-agents."""
        self.num_response_tokens = 0
        """Tokens of all blocks but the first ones of contexts."""
        self._encoder = encoder
        self._root_by_key: dict[bytes, Block] = {}
        self._sampled_by_key: dict[bytes, Block] = {}

    def look_up(self, request: ChatRequest) -> ContextLookup:
        """Return what is known of a conversation, and what is to be encoded."""
        root, *later = _segments(request)
        lookup = ContextLookup(request)
        block = self._root_by_key.get(root.key)
        for segment in (root, *later):
            if segment is not root and block is not None:
                block = _find_next(block, segment)
            if block is None:
                lookup.missing.append(segment)
            else:
                lookup.path.append((segment.key, block))
        lookup.num_known = len(lookup.path)
        _set_size(lookup)
        return lookup

    def encode(self, lookup: ContextLookup, max_tokens: int) -> None:
        """Encode what is missing of a conversation; the tree is unchanged.

        Args:
            lookup: The conversation, whose path gets the new blocks.
            max_tokens: Number of tokens from which the conversation is too long.

        Raises:
            GatewayError: the chat template cannot render the messages, or the conversation is too
                long.
        """
        missing, lookup.missing = lookup.missing, []
        if lookup.num_image_tokens >= max_tokens:
            raise _too_long(lookup.num_image_tokens, max_tokens)
        for segment in missing:
            block = self._encode_segment(lookup, segment)
            lookup.path.append((segment.key, block))
            lookup.num_new_bytes += block.num_bytes
            if block.length >= max_tokens:
                raise _too_long(block.length, max_tokens)
        if (length := lookup.path[-1][1].length) >= max_tokens:
            raise _too_long(length, max_tokens)

    def add(self, lookup: ContextLookup) -> Block:
        """Add an encoded conversation, and return the block after which its answer is sampled."""
        self.num_branches += self._begins_branch(lookup)
        for key, block in lookup.path:
            self._attach(key, block)
        return lookup.path[-1][1]

    def _begins_branch(self, lookup: ContextLookup) -> bool:
        """Return whether a conversation parts from those before it, other than behind an answer."""
        if not self.num_answers or lookup.num_known == len(lookup.path):
            return False
        parent = lookup.path[lookup.num_known][1].parent
        return parent is None or not parent.is_sampled or bool(parent.continuations)

    def _encode_segment(self, lookup: ContextLookup, segment: _Segment) -> Block:
        """Return the block of messages that the tree does not have behind the path."""
        parent = lookup.path[-1][1] if lookup.path else None
        if segment.answer is None and not segment.prefill:
            return self._encode_inputs(lookup.request, parent, segment)
        assert parent is not None, "a conversation begins with the messages before an answer"
        if segment.prefill:
            token_ids = self._encoder.encode_prefill(segment.prefill)
        elif sampled := self._sampled_by_key.get(segment.key):
            token_ids = sampled.token_ids
        else:
            message = segment.answer or {}
            calls = message.get("tool_calls", ())
            token_ids = self._encoder.encode_assistant(message["content"], calls)
        return Block(
            parent=parent,
            digest=_chain_digest(parent, segment.key),
            token_ids=token_ids,
            answer=segment.answer,
            prefill=segment.prefill,
        )

    def _encode_inputs(
        self, request: ChatRequest, parent: Block | None, segment: _Segment
    ) -> Block:
        messages, variables = segment.messages, request.template_variables
        if parent is None:
            token_ids, images = self._encoder.encode_first(messages, request.tools, variables)
        else:
            token_ids, images = self._encoder.encode_next(messages, parent.token_ids, variables)
        return Block(
            parent=parent,
            digest=segment.key if parent is None else _chain_digest(parent, segment.key),
            token_ids=token_ids,
            images=images,
            messages=messages,
            tools=() if parent else tuple(request.tools),
        )

    def add_answer(
        self, block: Block, generation: Generation, content: str, calls: Sequence[ToolCall]
    ) -> Block:
        """Add what the policy sampled after a block; `content` and `calls` are the client's."""
        content = block.prefill + content
        key = assistant_key(content, calls)
        answer = Block(
            parent=block,
            digest=_chain_digest(block, key),
            token_ids=generation.token_ids,
            answer={"role": "assistant", "content": content, "tool_calls": tuple(calls)},
            generation=generation,
            num_calls=len(calls),
            last_order=self.num_answers,
        )
        self._attach(key, answer)
        self.first_answer = self.first_answer or answer
        if block.prefill and block.parent is not None:
            block.parent.prefilled_answers[key] = answer
        else:
            self._sampled_by_key[key] = answer
        for ancestor in block.chain:
            ancestor.last_order = self.num_answers
        self.num_answers += 1
        return answer

    def _attach(self, key: bytes, block: Block) -> None:
        """Make a block part of the tree, unless it is already."""
        parent = block.parent
        if parent is None:
            if key not in self._root_by_key:
                self._root_by_key[key] = block
                self.roots.append(block)
        elif parent.children.get(key) is not block:
            parent.children[key] = block
            parent.continuations.append(block)
            self.num_response_tokens += len(block.token_ids)


def _chain_digest(parent: Block, key: bytes) -> bytes:
    return blake2b(parent.digest + key, digest_size=16).digest()


@dataclass(slots=True, kw_only=True, frozen=True)
class _Segment:
    """Messages of a conversation that are one block."""

    key: bytes
    messages: tuple[Message, ...] = ()
    answer: Message | None = None
    """The message, if it is the assistant's."""
    prefill: str = ""
    """The text, if it is the beginning of the answer."""


@dataclass(slots=True)
class ContextLookup:
    """A conversation in the tree: the blocks that it has, and the messages that have none."""

    request: ChatRequest
    path: list[tuple[bytes, Block]] = field(default_factory=list)
    """Keys and blocks from the first one of the context."""
    missing: list[_Segment] = field(default_factory=list)
    """The segments behind the path, which are not encoded yet."""
    missing_size: int = 0
    """Characters and tokens of images that are to be encoded; a message counts as 512 characters,
    for the time of its template."""
    num_image_tokens: int = 0
    """Tokens of images that are to be encoded."""
    num_known: int = 0
    """Number of blocks at the start of the path that the tree has."""
    num_new_bytes: int = 0
    """Memory of the blocks that `encode` has made."""

    @property
    def known_block(self) -> Block | None:
        """The last block, if the tree has all of the conversation."""
        return None if self.missing or not self.path else self.path[-1][1]

    @property
    def new_images(self) -> dict[str, ImageInput]:
        """Images of the blocks that the tree does not have, by id."""
        new = self.path[self.num_known :]
        images = (placed.image for _, block in new for placed in block.images)
        return {image.image_id: image for image in images}


def _segments(request: ChatRequest) -> list[_Segment]:
    """Return the messages of a conversation as blocks."""
    segments: list[_Segment] = []
    inputs: list[Message] = []

    def end_inputs() -> None:
        is_first = not segments
        tools, variables = (request.tools, request.template_variables) if is_first else ((), None)
        key = block_key(inputs, tools, variables)
        segments.append(_Segment(key=key, messages=tuple(inputs)))
        inputs.clear()

    for message in request.messages:
        if message["role"] == "assistant":
            end_inputs()
            key = assistant_key(message["content"], message.get("tool_calls", ()))
            segments.append(_Segment(key=key, answer=message))
        else:
            inputs.append(message)
    end_inputs()
    if request.prefill:
        key = prefill_key(request.prefill)
        segments.append(_Segment(key=key, prefill=request.prefill))
    return segments


def _set_size(lookup: ContextLookup) -> None:
    """Set the sizes of what is to be encoded."""
    values = [(segment.messages, segment.answer, segment.prefill) for segment in lookup.missing]
    num_messages = sum(1 + len(segment.messages) for segment in lookup.missing)
    tools = () if lookup.path else lookup.request.tools
    messages = [message for segment in lookup.missing for message in segment.messages]
    lookup.num_image_tokens = sum(image.num_tokens for image in image_parts(messages))
    lookup.missing_size = 512 * num_messages + num_chars((values, tools)) + lookup.num_image_tokens


def _too_long(num_tokens: int, max_tokens: int) -> GatewayError:
    return GatewayError(
        ErrorKind.context_length,
        f"messages: got at least {num_tokens} tokens, expected fewer than {max_tokens}, the "
        "context length of the model",
    )


def _find_next(block: Block, segment: _Segment) -> Block | None:
    """Return the block of a segment behind a block, None if there is none."""
    found = block.children.get(segment.key)
    if found is None and segment.answer is not None:
        found = block.prefilled_answers.get(segment.key)
    return found


@dataclass(slots=True, kw_only=True)
class SessionResponse:
    """The contexts of a session as the response of one trajectory."""

    token_buffer: TokenBuffer
    context_resets: tuple[ContextReset, ...]
    positions: dict[Block, int]
    """Number of response tokens before each sampled block."""


def build_response(tree: ContextTree, prompt: Prompt, encoder: BlockEncoder) -> SessionResponse:
    """Return the response with every sampled token of the tree once (see the module's text)."""
    writer = _ResponseWriter(prompt, encoder)
    for root in _in_order(tree.roots):
        for block in _depth_first(root):
            writer.write(block)
    return SessionResponse(
        token_buffer=writer.token_buffer,
        context_resets=tuple(writer.context_resets),
        positions=writer.positions,
    )


def _in_order(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks with an answer below them, the one with the latest answer last."""
    answered = [block for block in blocks if block.last_order >= 0]
    return sorted(answered, key=lambda block: block.last_order)


def _depth_first(root: Block) -> Iterator[Block]:
    """Yield the blocks below and including `root`; a chain may be longer than Python's stack."""
    stack = [root]
    while stack:
        block = stack.pop()
        yield block
        stack += reversed(_in_order(block.continuations))


class _ResponseWriter:
    def __init__(self, prompt: Prompt, encoder: BlockEncoder) -> None:
        self.token_buffer = TokenBuffer()
        self.context_resets: list[ContextReset] = []
        self.positions: dict[Block, int] = {}
        self._prompt = prompt
        self._encoder = encoder
        self._tail: Block | None = None
        """Block whose context is the last reset, or the prompt, and the response from there."""

    def write(self, block: Block) -> None:
        """Append a block, unless it is part of the context of the next reset."""
        if block.parent is None:
            is_prompt = not self.token_buffer.turns and self._is_prompt(block)
            self._tail = block if is_prompt else None
        elif block.generation is not None:
            self._write_answer(block, block.parent)
        elif block.messages and block.parent is self._tail and self.token_buffer.turns:
            self._write_inputs(block)
            self._tail = block

    def _write_answer(self, block: Block, parent: Block) -> None:
        generation = block.generation
        assert generation is not None
        if self._tail is not parent:
            if generation.routes is not None:
                generation = replace(generation, routes=join_routes(block.routes))
            token_ids, images = parent.context()
            start = len(self.token_buffer)
            self.context_resets.append(
                ContextReset(start=start, token_ids=token_ids, images=images)
            )
        self.positions[block] = len(self.token_buffer)
        self.token_buffer.append_sampled(generation)
        self.token_buffer.close_turn(self._encoder.decode(block.token_ids))
        self._tail = block

    def _write_inputs(self, block: Block) -> None:
        """Append messages as one turn each; the last one has the tokens of all."""
        *earlier, last = block.messages
        for message in earlier:
            self._append_observation(message, (), ())
        self._append_observation(last, block.token_ids, block.images)

    def _append_observation(
        self, message: Message, token_ids: Sequence[int], images: Sequence[PlacedImage]
    ) -> None:
        is_tool = message["role"] == "tool"
        text = self._encoder.shown_text(message)
        outcome = ToolOutcome(
            tool=str(message.get("name") or message["role"]),
            status=ToolStatus.user_error if message.get("is_error") else ToolStatus.ok,
            answer=text,
            latency_s=0.0,
        )
        role = Role.tool if is_tool else Role.user
        self.token_buffer.append_observation(token_ids, text, outcome, role, images)

    def _is_prompt(self, root: Block) -> bool:
        """Return whether the first block is the prompt as the data set encodes it."""
        shown = [(placed.start, placed.image.image_id) for placed in root.images]
        known = [(placed.start, placed.image.image_id) for placed in self._prompt.images]
        return root.token_ids == tuple(self._prompt.token_ids) and shown == known
