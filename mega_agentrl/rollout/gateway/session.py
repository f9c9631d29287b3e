"""One attempt of an agent at a prompt: its limits, its requests, and what was sampled for it.

The limits of the native loop hold: `rollout.max_response_tokens`, `max_turns`, `max_tool_calls` and
`engine.max_model_len`. An answer that reaches one ends with the dialect's stop for length. The
next request gets such an answer without any text, and each one after that an error that clients do
not retry.

A client that sends a request again, because it lost the connection or ran into a time limit of its
own, gets the answer that was sampled for the first one. Requests of a session may overlap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.context import INFRA_ERRORS
from mega_agentrl.rollout.gateway.capture import ContextTree, build_response
from mega_agentrl.rollout.gateway.chat import (
    AnswerFinish,
    ChatAnswer,
    ErrorKind,
    GatewayError,
    make_call_id,
)
from mega_agentrl.rollout.gateway.encoding import BlockEncoder
from mega_agentrl.rollout.gateway.ignored_fields import RequestCounts
from mega_agentrl.rollout.gateway.limits import SharedResources
from mega_agentrl.rollout.gateway.request_size import (
    MAX_CHARS_PER_TOKEN,
    MIN_TOKENS,
    check_request_size,
    decoding_work,
)
from mega_agentrl.rollout.gateway.sampling import PendingRequest, TurnSampler
from mega_agentrl.rollout.gateway.session_images import SessionImages
from mega_agentrl.rollout.generation.interruptible import truncate_generation
from mega_agentrl.rollout.generation.turn_generator import request_failure
from mega_agentrl.types.errors import RankLostError
from mega_agentrl.types.protocols import ChatCodec
from mega_agentrl.types.records import (
    AssistantText,
    FinishReason,
    Generation,
    StopReason,
    ToolOutcome,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from typing import Any

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.rollout.gateway.capture import Block, ContextLookup, SessionResponse
    from mega_agentrl.rollout.gateway.chat import ChatRequest
    from mega_agentrl.rollout.gateway.record import SessionRecord
    from mega_agentrl.rollout.gateway.tools import SessionTools
    from mega_agentrl.rollout.tracing import TrajectorySpans
    from mega_agentrl.types.records import Prompt

MAX_RUNNING_REQUESTS = 64
"""Requests of one session that may run at once."""

MAX_REFUSED_REQUESTS = 1000
"""Requests of one session that may be refused for what they contain, after which all are. Each
takes work before it is refused, and no agent learns anything from the thousandth."""

CLOSE_TIMEOUT_S = 5.0
"""Time that the engine has to end the running requests of a closed session."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class SessionScope:
    """The trajectory that a session belongs to."""

    context: RolloutContext
    prompt: Prompt
    prompt_key: str
    """Name of the prompt, unique in the pass."""
    path: tuple[int, ...]
    """Position in the tree."""
    spans: TrajectorySpans
    tools: SessionTools
    """The run's own tools, for agents that call them."""
    record: SessionRecord | None = None
    """Answers of the trajectory that this one was forked from; None for a root."""
    probe: Probe | None = None
    """Asked at each turn whether to fork; None never forks."""

    @property
    def trajectory_id(self) -> str:
        """Unique id within the run."""
        return self.context.trajectory_id(self.prompt_key, self.path)


@dataclass(slots=True, kw_only=True, frozen=True)
class Probe:
    """Forks of a session, decided on the first tokens of a turn."""

    num_tokens: Callable[[AgentSession, Block], int]
    """Number of tokens to sample after a block before `on_sampled`; 0 does not ask."""
    on_sampled: Callable[[AgentSession, Block, Generation], Awaitable[None]]
    """Receives the sampled tokens, and may start forks."""


class AgentSession:
    """Answers the requests of one attempt, from the record of a parent or by sampling.

    Args:
        scope: The trajectory.
        shared: What the sessions of a gateway share; None for a session alone.

    Raises:
        TypeError: the policy has no chat template.
    """

    def __init__(self, scope: SessionScope, shared: SharedResources | None = None) -> None:
        context = scope.context
        if not isinstance(context.codec, ChatCodec):
            raise TypeError(
                f"codec: got {type(context.codec).__name__}, expected one with a chat template, "
                "which rollout.agent needs"
            )
        self.scope = scope
        self.encoder = BlockEncoder(context.codec, context.tools, context.images)
        self.tree = ContextTree(self.encoder)
        self.is_closed = False
        self.num_calls = 0
        """Tool calls that the client got."""
        self.num_reused_answers = 0
        """Answers that were sent again to a client that had lost them."""
        self.requests = RequestCounts()
        """The requests of the client, counted by the server."""
        loop = asyncio.get_running_loop()
        self.diverged: asyncio.Future[None] = loop.create_future()
        """Done when the agent's requests differ from the record of its parent."""
        self.fatal_error: asyncio.Future[BaseException] = loop.create_future()
        """An error of the run itself, which must end the trajectory's task."""
        self._shared = shared or SharedResources()
        self._images = SessionImages(context.images)
        self._sampler = TurnSampler(self)
        self._entering = asyncio.Lock()
        """Held while a request is read, encoded and added to the tree: one at a time."""
        self._num_entering = self._num_refused = 0
        """Requests that are being received, or wait for the lock, or have it; and refused ones."""
        self._replayed: set[Block] = set()
        self._has_exceeded_size = False
        """Whether a request was too long for the context, or for what the session may hold."""
        self._spent: StopReason | None = None
        self._has_sent_stop = False
        self._last_finish: FinishReason | None = None
        self._failed_blocks: dict[Block, tuple[StopReason, str]] = {}
        self._undelivered: dict[Block, dict[str, asyncio.Task[ChatAnswer]]] = {}
        self._running: dict[str, asyncio.Task[ChatAnswer]] = {}
        self._sampling: set[str] = set()
        """Running requests that get an answer of the policy, which takes a turn."""
        self._tool_calls: set[asyncio.Task[ToolOutcome]] = set()
        self._num_samples: dict[Block, int] = {}
        self._num_requests = 0
        self._block_by_answer_id: dict[str, Block] = {}
        self._answered: dict[str, tuple[Block, int]] = {}
        """Block of an answer and the number of instructions of its request, by answer id."""

    @contextmanager
    def entering(self, *, is_retry: bool = False) -> Iterator[None]:
        """Count a request of which nothing has been read yet, until it is running or refused.

        Args:
            is_retry: Whether the client has sent the request before.

        Raises:
            GatewayError: the session takes no request, or not at the moment.
        """
        self.check_open()
        if self._spent is not None and self._has_sent_stop:
            raise self._budget_error(self._spent)
        if self._num_refused >= MAX_REFUSED_REQUESTS:
            self._has_exceeded_size = True
            raise GatewayError(ErrorKind.budget_spent, "too many requests were refused")
        self._check_load(self._num_entering)
        if not is_retry:
            self._check_load(len(self._running))
        self._num_entering += 1
        try:
            yield
        except GatewayError as error:
            sizes = (ErrorKind.context_length, ErrorKind.too_large)
            self._has_exceeded_size |= error.kind in sizes
            self._num_refused += error.kind in (*sizes, ErrorKind.invalid_request)
            raise
        finally:
            self._num_entering -= 1

    async def admit(
        self,
        read: Callable[[], ChatRequest],
        num_bytes: int,
        num_objects: int = 0,
        *,
        is_retry: bool = False,
    ) -> tuple[ChatRequest, asyncio.Future[ChatAnswer]]:
        """Start to answer a request, and return it with its future answer.

        It is sampled even if the client goes away, and waits for a retry.

        Args:
            read: Decodes the request.
            num_bytes: Size of its body.
            num_objects: Number of JSON objects in it.
            is_retry: Whether the client has sent the request before.

        Raises:
            GatewayError: the request cannot be answered; the future raises it, too.
        """
        async with self._entering:
            lookup = await self._look_up(read, num_bytes, num_objects)
            known = lookup.known_block
            lost = self._undelivered.get(known) if known and is_retry else None
            if lost:
                self.num_reused_answers += 1
                return lookup.request, asyncio.shield(next(iter(lost.values())))
            self._check_load(len(self._running))
            await self._encode(lookup, self.scope.context.max_model_len)
            stop = self._spent = self._spent or self._find_spent_budget()
            block = self._add(lookup) if stop is None else lookup.path[-1][1]
            task = self._start(block, lookup.request, stops=stop is not None)
            return lookup.request, asyncio.shield(task)

    async def _look_up(
        self, read: Callable[[], ChatRequest], num_bytes: int, num_objects: int
    ) -> ContextLookup:
        """Read a request and look its conversation up, in a thread if it is long."""
        max_model_len = self.scope.context.max_model_len

        def decode() -> ChatRequest:
            request = read()
            check_request_size(request, num_bytes, max_model_len)
            return request

        work, threads = decoding_work(num_bytes, num_objects), self._shared.threads
        request = await self._images.check(self._continued(await threads.run(work, decode)))
        lookup = await threads.run(work, lambda: self.tree.look_up(request))
        self.check_open()
        return lookup

    async def _encode(self, lookup: ContextLookup, max_tokens: int) -> None:
        run = self._shared.threads.run
        await run(lookup.missing_size, lambda: self.tree.encode(lookup, max_tokens))
        self.check_open()

    def _add(self, lookup: ContextLookup) -> Block:
        """Add a conversation to the tree.

        Raises:
            GatewayError: the session, or all sessions together, would hold too much.
        """
        images = lookup.new_images
        num_bytes = lookup.num_new_bytes + self._images.new_bytes(images)
        held = self._shared.held
        if not held.take(self, num_bytes):
            raise GatewayError(
                ErrorKind.too_large,
                f"messages: got {num_bytes} bytes of messages, images and tokens in addition to "
                f"{held.held_by(self)} that the session holds, expected at most "
                f"{held.max_per_owner}, or its share of {held.max_total} of all sessions",
            )
        self._images.add(images)
        return self.tree.add(lookup)

    def _start(
        self, block: Block, request: ChatRequest, *, stops: bool
    ) -> asyncio.Task[ChatAnswer]:
        """Start to answer a request; `stops` answers it without sampling."""
        pending = PendingRequest(
            name=f"{self.scope.trajectory_id}/{self._num_requests}",
            block=block,
            request=request,
            sample_index=self._num_samples.get(block, 0),
        )
        self._num_requests += 1
        self._num_samples[block] = pending.sample_index + 1
        self._block_by_answer_id[pending.answer_id] = block
        if not stops:
            self._sampling.add(pending.name)
        # The engine gets it at once; a stop lets requests run that came with it, none after it.
        loop, answer = asyncio.get_running_loop(), self._answer(pending, stops=stops)
        task = asyncio.Task(answer, loop=loop, eager_start=not stops)
        self._undelivered.setdefault(block, {})[pending.answer_id] = task
        self._running[pending.name] = task
        task.add_done_callback(lambda done: self._on_done(pending, done))
        return task

    def _check_load(self, num_requests: int) -> None:
        if num_requests >= MAX_RUNNING_REQUESTS:
            raise GatewayError(
                ErrorKind.overloaded,
                f"the session runs {num_requests} requests, the most it may at once",
            )

    def _on_done(self, pending: PendingRequest, task: asyncio.Task[ChatAnswer]) -> None:
        self._running.pop(pending.name, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, GatewayError):
            self._set_fatal(error)  # a bug ends the run, not only the request
        if task.cancelled() or error is not None:
            self._undelivered[pending.block].pop(pending.answer_id)  # a retry samples again

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Run one of the run's own tools.

        Raises:
            GatewayError: the session has ended, or the tools cannot be created.
        """
        self.check_open()
        if self.scope.tools.num_calls >= self.scope.context.config.max_tool_calls:
            raise self._budget_error(StopReason.call_limit)
        self.scope.tools.num_calls += 1
        call = asyncio.create_task(self.scope.tools.call(name, arguments))
        self._tool_calls.add(call)
        call.add_done_callback(self._on_tool_done)
        try:
            return await call
        except asyncio.CancelledError:
            self.check_open()
            raise
        except Exception as error:
            raise GatewayError(ErrorKind.engine_failed, f"tool {name}: {error}") from error

    def _on_tool_done(self, call: asyncio.Task[ToolOutcome]) -> None:
        self._tool_calls.discard(call)
        error = None if call.cancelled() else call.exception()
        if error is not None and not isinstance(error, INFRA_ERRORS):
            self._set_fatal(error)  # all first calls have failed, or a bug

    def check_open(self) -> None:
        """Raise `GatewayError` if the session has ended."""
        if self.is_closed:
            raise GatewayError(ErrorKind.unknown_key, "the session has ended")

    async def count_tokens(
        self, read: Callable[[], ChatRequest], num_bytes: int, num_objects: int = 0
    ) -> tuple[ChatRequest, int]:
        """Return a request and its number of tokens; nothing is sampled or kept.

        Args:
            read: Decodes the request.
            num_bytes: Size of its body.
            num_objects: Number of JSON objects in it.

        Raises:
            GatewayError: the policy cannot be shown the conversation, or it is many times as long
                as the context.
        """
        if self._spent is not None:
            raise self._budget_error(self._spent)
        max_tokens = MAX_CHARS_PER_TOKEN * max(self.scope.context.max_model_len, MIN_TOKENS)
        async with self._entering:
            lookup = await self._look_up(read, num_bytes, num_objects)
            await self._encode(lookup, max_tokens)
        return lookup.request, lookup.path[-1][1].length

    def mark_delivered(self, answer: ChatAnswer) -> None:
        """Note that the client has received an answer, so that it is not sent again."""
        if (block := self._block_by_answer_id.pop(answer.answer_id, None)) is not None:
            self._undelivered[block].pop(answer.answer_id)

    async def close(self) -> None:
        """Refuse further requests and end the running ones; their tokens are kept.

        Running calls of tools are cancelled.
        """
        self.is_closed = True
        running, calls = tuple(self._running.values()), tuple(self._tool_calls)
        for call in calls:
            call.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._sampler.abort()
                await asyncio.gather(*running, return_exceptions=True)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *calls, return_exceptions=True)
        self._shared.held.give_back(self)

    def build_response(self) -> SessionResponse:
        """Return all sampled tokens as the response of a trajectory."""
        return build_response(self.tree, self.scope.prompt, self.encoder)

    @property
    def stop_reason(self) -> StopReason:
        """Why the session ended, if its agent did not fail."""
        if self._failed_blocks:
            reasons = [reason for reason, _ in self._failed_blocks.values()]
            return min(reasons, key=lambda reason: reason is StopReason.aborted)
        if self._spent is not None:
            return self._spent
        match self._last_finish:
            case FinishReason.length:
                return StopReason.length
            case FinishReason.stop:
                return StopReason.stop
        return StopReason.eos

    @property
    def limit_reached(self) -> StopReason | None:
        """Limit after which the agent could not go on; None if it could."""
        return self._spent or (StopReason.length if self._has_exceeded_size else None)

    @property
    def is_unused(self) -> bool:
        """Whether the agent got no answer of the policy, and no limit was the reason."""
        return not self.tree.num_answers and not self._failed_blocks and not self.limit_reached

    @property
    def running_blocks(self) -> list[Block]:
        """Blocks after which an answer is being sampled."""
        return [
            block
            for block, tasks in self._undelivered.items()
            if not all(task.done() for task in tasks.values())
        ]

    def replayed_spans(self, response: SessionResponse) -> list[tuple[int, int]]:
        """Return first token and end of each answer that was recorded, not sampled."""
        return [
            (start, start + len(block.token_ids))
            for block, start in response.positions.items()
            if block in self._replayed
        ]

    def num_replayed_tokens(self, response: SessionResponse) -> int:
        """Return how many tokens of the response precede the first one that was not recorded."""
        own = [start for block, start in response.positions.items() if block not in self._replayed]
        return min(own, default=len(response.token_buffer))

    @property
    def failure(self) -> str:
        """Why a request failed that was not answered later; empty if none did."""
        return next((text for _, text in self._failed_blocks.values()), "")

    def _continued(self, request: ChatRequest) -> ChatRequest:
        """Return a request whose messages begin with the conversation that it continues.

        Raises:
            GatewayError: the session has no such answer.
        """
        if not request.previous_answer_id:
            return request
        if request.previous_answer_id not in self._answered:
            raise GatewayError(
                ErrorKind.not_found,
                f"got the id {request.previous_answer_id!r} of an earlier answer, expected one of "
                "this session",
            )
        block, num_dropped = self._answered[request.previous_answer_id]
        tools = block.chain[0].tools if request.inherits_tools else request.tools
        instructions = request.messages[: request.num_instructions]
        inputs = request.messages[request.num_instructions :]
        messages = (*instructions, *block.conversation[num_dropped:], *inputs)
        return replace(request, messages=messages, tools=tools, previous_answer_id="")

    async def _answer(self, pending: PendingRequest, *, stops: bool) -> ChatAnswer:
        try:
            return self._make_stop(pending) if stops else await self._sample_answer(pending)
        finally:
            self._sampling.discard(pending.name)

    async def _sample_answer(self, pending: PendingRequest) -> ChatAnswer:
        block = pending.block
        recorded = self._recorded_generation(block)
        generation = recorded or await self._sample_or_fail(pending)
        self._failed_blocks.pop(block, None)
        if recorded is None:
            # Requests that ran at the same time have used tokens of the same budget.
            if self.num_tokens_left < 1:
                self._spent = self._spent or StopReason.length
                return self._make_stop(pending)
            generation = truncate_generation(generation, self.num_tokens_left)
        self._last_finish = generation.finish_reason
        return self._add_answer(pending, generation, is_replayed=recorded is not None)

    def _make_stop(self, pending: PendingRequest) -> ChatAnswer:
        """Return the answer without text that tells the client that a limit is reached."""
        self._has_sent_stop = True
        parts = AssistantText(reasoning="", content="", calls=())
        return self._make_answer(pending, parts, AnswerFinish.length)

    def _find_spent_budget(self) -> StopReason | None:
        if self.num_tokens_left < 1:
            return StopReason.length
        num_turns = self.tree.num_answers + len(self._sampling)
        return StopReason.turn_limit if num_turns >= self.scope.context.config.max_turns else None

    @property
    def num_tokens_left(self) -> int:
        """Number of response tokens that the session has left."""
        context, prompt = self.scope.context, self.scope.prompt
        return context.max_response_tokens(prompt) - self.tree.num_response_tokens

    def _recorded_generation(self, block: Block) -> Generation | None:
        """Return the recorded answer after a block, None if it is to be sampled."""
        record = self.scope.record
        if record is None:
            return None
        generation = record.next_generation(block.digest)
        if generation is None and not record.is_open(block.digest):
            if not self.diverged.done():
                self.diverged.set_result(None)
            raise GatewayError(
                ErrorKind.unknown_key, "the requests differ from those of the session it repeats"
            )
        return generation

    async def _sample_or_fail(self, pending: PendingRequest) -> Generation:
        """Sample an answer; an error of the engine fails the session until a retry succeeds."""
        try:
            generation = await self._sampler.sample(pending)
        except RankLostError as error:
            self._set_fatal(error)
            raise GatewayError(ErrorKind.engine_failed, "the run restarts") from error
        except INFRA_ERRORS as error:
            self._failed_blocks[pending.block] = request_failure(error), str(error)
            _log.warning("%s: %s", pending.name, error)
            raise GatewayError(ErrorKind.engine_failed, f"the engine failed: {error}") from error
        is_aborted = generation.finish_reason is FinishReason.aborted
        if is_aborted and not (self.is_closed and generation.token_ids):
            text = "the engine aborted the request"
            if not self.is_closed:  # otherwise the client has ended without it
                self._failed_blocks[pending.block] = StopReason.aborted, text
            raise GatewayError(ErrorKind.engine_failed, text)
        return generation

    def _set_fatal(self, error: BaseException) -> None:
        if not self.fatal_error.done():
            self.fatal_error.set_result(error)

    def _add_answer(
        self, pending: PendingRequest, generation: Generation, *, is_replayed: bool
    ) -> ChatAnswer:
        """Add sampled tokens to the tree and return the answer for the client."""
        text = self.encoder.decode(generation.token_ids)
        if (stop := generation.stop_string) and stop in text:
            text = text[: text.rindex(stop)]
        takes_calls = pending.request.takes_calls
        parts = self.encoder.split_answer(pending.block, text, takes_calls=takes_calls)
        finish = AnswerFinish.tool_calls if parts.calls else AnswerFinish.stop
        if generation.finish_reason is FinishReason.length:
            finish = AnswerFinish.length
        if parts.calls and self.num_calls >= self.scope.context.config.max_tool_calls:
            self._spent = StopReason.call_limit
            parts, finish = replace(parts, calls=()), AnswerFinish.length
        self.num_calls += len(parts.calls)
        added = self.tree.add_answer(pending.block, generation, parts.content, parts.calls)
        if not self.is_closed:
            self._shared.held.add(self, added.num_bytes)
        if is_replayed:
            self._replayed.add(added)
        self._answered[pending.answer_id] = (added, pending.request.num_instructions)
        if self.num_tokens_left < 1 and finish is AnswerFinish.length:
            self._spent = self._spent or StopReason.length
        return self._make_answer(pending, parts, finish, generation)

    def _make_answer(
        self,
        pending: PendingRequest,
        parts: AssistantText,
        finish: AnswerFinish,
        generation: Generation | None = None,
    ) -> ChatAnswer:
        number = self.tree.num_answers
        return ChatAnswer(
            answer_id=pending.answer_id,
            reasoning=parts.reasoning,
            content=parts.content,
            tool_calls=tuple(
                (make_call_id(number, index), call) for index, call in enumerate(parts.calls)
            ),
            finish=finish,
            stop_string=generation.stop_string if generation else None,
            num_prompt_tokens=pending.block.length,
            num_cached_tokens=generation.num_cached_tokens if generation else 0,
            num_answer_tokens=len(generation.token_ids) if generation else 0,
            created_s=int(time.time()),
        )

    def _budget_error(self, reason: StopReason) -> GatewayError:
        config = self.scope.context.config
        limit = {
            StopReason.length: f"rollout.max_response_tokens={config.max_response_tokens}",
            StopReason.turn_limit: f"rollout.max_turns={config.max_turns}",
            StopReason.call_limit: f"rollout.max_tool_calls={config.max_tool_calls}",
        }[reason]
        message = f"the session has used up {limit}; it cannot continue"
        return GatewayError(ErrorKind.budget_spent, message)
