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
from contextlib import suppress
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
from mega_agentrl.rollout.generation.interruptible import merge_generations, truncate_generation
from mega_agentrl.rollout.generation.turn_generator import (
    generate_or_abort,
    request_failure,
    request_seed,
)
from mega_agentrl.types.errors import RankLostError
from mega_agentrl.types.protocols import ChatCodec
from mega_agentrl.types.records import (
    AssistantText,
    FinishReason,
    GenerateRequest,
    Generation,
    StopReason,
    ToolOutcome,
)
from mega_agentrl.vision.placeholders import content_parts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from typing import Any

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.rollout.gateway.capture import Block, SessionResponse
    from mega_agentrl.rollout.gateway.chat import ChatRequest
    from mega_agentrl.rollout.gateway.record import SessionRecord
    from mega_agentrl.rollout.gateway.tools import SessionTools
    from mega_agentrl.rollout.tracing import TrajectorySpans
    from mega_agentrl.types.records import Prompt

MAX_RUNNING_REQUESTS = 64
"""Requests of one session that may run at once."""

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
class _PendingRequest:
    """A request that is being answered."""

    name: str
    """Unique within the run."""
    block: Block
    """Last block of its context."""
    request: ChatRequest
    sample_index: int
    """Number of earlier answers after the same block."""

    @property
    def answer_id(self) -> str:
        """Id of the answer, which clients see."""
        return self.name.replace("/", "-")


@dataclass(slots=True, kw_only=True, frozen=True)
class Probe:
    """Forks of a session, decided on the first tokens of a turn."""

    num_tokens: Callable[[AgentSession, Block], int]
    """Number of tokens to sample after a block before `on_sampled`; 0 does not ask."""
    on_sampled: Callable[[AgentSession, Block, Generation], Awaitable[None]]
    """Receives the sampled tokens, and may start forks."""


class AgentSession:
    """Answers the requests of one attempt, from the record of a parent or by sampling.

    Raises:
        TypeError: the policy has no chat template.
    """

    def __init__(self, scope: SessionScope) -> None:
        context = scope.context
        if not isinstance(context.codec, ChatCodec):
            raise TypeError(
                f"codec: got {type(context.codec).__name__}, expected one with a chat template, "
                "which rollout.agent needs"
            )
        self.scope = scope
        self.encoder = BlockEncoder(context.codec, context.tools, context.images)
        self.tree = ContextTree(self.encoder)
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
        self._replayed: set[Block] = set()
        self._has_exceeded_context = False
        self._spent: StopReason | None = None
        self._has_sent_stop = False
        self._last_finish: FinishReason | None = None
        self._failed_blocks: dict[Block, tuple[StopReason, str]] = {}
        self._undelivered: dict[Block, dict[str, asyncio.Task[ChatAnswer]]] = {}
        self._running: dict[str, asyncio.Task[ChatAnswer]] = {}
        self._engine_ids: set[str] = set()
        """Requests that the engine runs; a turn with a probe takes two."""
        self._tool_calls: set[asyncio.Task[ToolOutcome]] = set()
        self._num_samples: dict[Block, int] = {}
        self._num_requests = 0
        self._block_by_answer_id: dict[str, Block] = {}
        self._answered: dict[str, tuple[Block, int]] = {}
        """Block of an answer and the number of instructions of its request, by answer id."""
        self._is_closed = False

    async def complete(self, request: ChatRequest, *, is_retry: bool = False) -> ChatAnswer:
        """Return the next message of the assistant.

        Args:
            request: The request; its images have been checked.
            is_retry: Whether the client has sent the request before.

        Raises:
            GatewayError: the request cannot be answered.
        """
        self._check_open()
        if self._spent is not None and self._has_sent_stop:
            raise self._budget_error(self._spent)
        request = await self._with_checked_images(self._continued(request))
        self._check_open()
        block = self._find_block(request)
        if is_retry and (lost := self._undelivered.get(block)):
            self.num_reused_answers += 1
            return await asyncio.shield(next(iter(lost.values())))
        if len(self._running) >= MAX_RUNNING_REQUESTS:
            raise GatewayError(
                ErrorKind.overloaded,
                f"the session runs {len(self._running)} requests, the most it may at once",
            )
        pending = _PendingRequest(
            name=f"{self.scope.trajectory_id}/{self._num_requests}",
            block=block,
            request=request,
            sample_index=self._num_samples.get(block, 0),
        )
        self._num_requests += 1
        self._num_samples[block] = pending.sample_index + 1
        self._block_by_answer_id[pending.answer_id] = block
        task = asyncio.create_task(self._answer(pending))
        self._undelivered.setdefault(block, {})[pending.answer_id] = task
        self._running[pending.name] = task
        task.add_done_callback(lambda done: self._on_done(pending, done))
        # The task goes on if the client goes away: the answer waits for its retry.
        return await asyncio.shield(task)

    def _find_block(self, request: ChatRequest) -> Block:
        """Return the last block of a request's context; its new blocks are added to the tree."""
        max_model_len = self.scope.context.max_model_len
        try:
            return self.tree.find_or_add(request, max_model_len)
        except GatewayError as error:
            self._has_exceeded_context |= error.kind is ErrorKind.context_length
            raise

    def _on_done(self, pending: _PendingRequest, task: asyncio.Task[ChatAnswer]) -> None:
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
        self._check_open()
        if self.scope.tools.num_calls >= self.scope.context.config.max_tool_calls:
            raise self._budget_error(StopReason.call_limit)
        call = asyncio.create_task(self.scope.tools.call(name, arguments))
        self._tool_calls.add(call)
        call.add_done_callback(self._on_tool_done)
        try:
            return await call
        except asyncio.CancelledError:
            self._check_open()
            raise
        except Exception as error:
            raise GatewayError(ErrorKind.engine_failed, f"tool {name}: {error}") from error

    def _on_tool_done(self, call: asyncio.Task[ToolOutcome]) -> None:
        self._tool_calls.discard(call)
        error = None if call.cancelled() else call.exception()
        if error is not None and not isinstance(error, INFRA_ERRORS):
            self._set_fatal(error)  # all first calls have failed, or a bug

    def _check_open(self) -> None:
        if self._is_closed:
            raise GatewayError(ErrorKind.unknown_key, "the session has ended")

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a conversation; nothing is sampled or kept.

        Raises:
            GatewayError: the policy cannot be shown the conversation.
        """
        request = await self._with_checked_images(self._continued(request))
        return self.tree.count_tokens(request)

    def mark_delivered(self, answer: ChatAnswer) -> None:
        """Note that the client has received an answer, so that it is not sent again."""
        block = self._block_by_answer_id.pop(answer.answer_id, None)
        if block is not None:
            self._undelivered[block].pop(answer.answer_id)

    async def close(self) -> None:
        """Refuse further requests and end the running ones; their tokens are kept.

        Running calls of tools are cancelled.
        """
        self._is_closed = True
        generator = self.scope.context.generator
        running, calls = tuple(self._running.values()), tuple(self._tool_calls)
        for call in calls:
            call.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for engine_id in tuple(self._engine_ids):
                    with suppress(*INFRA_ERRORS):
                        await generator.abort(engine_id)
                await asyncio.gather(*running, return_exceptions=True)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *calls, return_exceptions=True)

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
        return self._spent or (StopReason.length if self._has_exceeded_context else None)

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

    async def _with_checked_images(self, request: ChatRequest) -> ChatRequest:
        """Return the request with records in place of the files of images.

        Raises:
            GatewayError: the model cannot be shown an image.
        """
        messages = list(request.messages)
        for index, message in enumerate(messages):
            if any("data" in part for part in content_parts(message["content"])):
                parts = [await self._checked_part(part) for part in message["content"]]
                messages[index] = {**message, "content": parts}
        return replace(request, messages=tuple(messages))

    async def _checked_part(self, part: dict[str, Any]) -> dict[str, Any]:
        if "data" not in part:
            return part
        loader = self.scope.context.images
        if loader is None:
            raise GatewayError(
                ErrorKind.invalid_request,
                "messages: got an image, expected text only; model.path is a model without a "
                "vision tower",
            )
        try:
            return {"type": "image", "image": await loader.check(part["data"], "messages: image")}
        except ValueError as error:
            raise GatewayError(ErrorKind.invalid_request, str(error)) from error

    async def _answer(self, pending: _PendingRequest) -> ChatAnswer:
        block = pending.block
        if self._spent is None:
            self._spent = self._find_spent_budget()
        if self._spent is not None:
            return self._make_stop(pending)
        recorded = self._recorded_generation(block)
        generation = recorded or await self._sample_or_fail(pending)
        self._failed_blocks.pop(block, None)
        if recorded is None:
            # Requests that ran at the same time have used tokens of the same budget.
            if self._num_tokens_left < 1:
                self._spent = self._spent or StopReason.length
                return self._make_stop(pending)
            generation = truncate_generation(generation, self._num_tokens_left)
        self._last_finish = generation.finish_reason
        return self._add_answer(pending, generation, is_replayed=recorded is not None)

    def _make_stop(self, pending: _PendingRequest) -> ChatAnswer:
        """Return the answer without text that tells the client that a limit is reached."""
        self._has_sent_stop = True
        parts = AssistantText(reasoning="", content="", calls=())
        return self._make_answer(pending, parts, AnswerFinish.length)

    def _find_spent_budget(self) -> StopReason | None:
        config = self.scope.context.config
        if self._num_tokens_left < 1:
            return StopReason.length
        num_turns = self.tree.num_answers + len(self._running) - 1  # this request is running
        return StopReason.turn_limit if num_turns >= config.max_turns else None

    @property
    def _num_tokens_left(self) -> int:
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

    async def _sample_or_fail(self, pending: _PendingRequest) -> Generation:
        """Sample an answer; an error of the engine fails the session until a retry succeeds."""
        try:
            generation = await self._sample(pending)
        except (GatewayError, asyncio.CancelledError):
            raise
        except RankLostError as error:
            self._set_fatal(error)
            raise GatewayError(ErrorKind.engine_failed, "the run restarts") from error
        except INFRA_ERRORS as error:
            self._failed_blocks[pending.block] = request_failure(error), str(error)
            _log.warning("%s: %s", pending.name, error)
            raise GatewayError(ErrorKind.engine_failed, f"the engine failed: {error}") from error
        is_aborted = generation.finish_reason is FinishReason.aborted
        if is_aborted and not (self._is_closed and generation.token_ids):
            text = "the engine aborted the request"
            self._failed_blocks[pending.block] = StopReason.aborted, text
            raise GatewayError(ErrorKind.engine_failed, text)
        return generation

    def _set_fatal(self, error: BaseException) -> None:
        if not self.fatal_error.done():
            self.fatal_error.set_result(error)

    async def _sample(self, pending: _PendingRequest) -> Generation:
        """Sample one turn, in two pieces if the branch policy asks for a probe."""
        block, request = pending.block, pending.request
        max_tokens = self._max_tokens(block, request)
        engine_request = await self._engine_request(pending, max_tokens)
        probe = self.scope.probe
        # The engine looks for a stop string in the output of one request only.
        num_probed = 0 if probe is None or request.stop else probe.num_tokens(self, block)
        self.scope.spans.start_turn()
        if probe is None or not 0 < num_probed < max_tokens:
            return await self._generate(engine_request)
        piece = await self._generate(replace(engine_request, max_tokens=num_probed))
        if piece.finish_reason is not FinishReason.aborted and not self._is_closed:
            await probe.on_sampled(self, block, piece)
        if piece.finish_reason is not FinishReason.length:
            return piece
        if self._is_closed:  # perhaps while the forks were made
            return replace(piece, finish_reason=FinishReason.aborted)
        rest = replace(
            engine_request,
            request_id=f"{pending.name}.1",
            token_ids=(*engine_request.token_ids, *piece.token_ids),
            max_tokens=max_tokens - len(piece.token_ids),
            seed=self._seed(pending, 1),
            routes_start=engine_request.routes_start if piece.routes is None else piece.routes.stop,
        )
        generation = await self._generate(rest)
        return merge_generations(
            [piece, generation], generation.finish_reason, generation.stop_string
        )

    async def _generate(self, request: GenerateRequest) -> Generation:
        """Run a request of the engine, which `close` can end.

        Raises:
            GatewayError: the session has ended.
        """
        self._check_open()
        self._engine_ids.add(request.request_id)
        try:
            work = generate_or_abort(self.scope.context.generator, request)
            return await self.scope.spans.trace_generate(request, work)
        finally:
            self._engine_ids.discard(request.request_id)

    def _max_tokens(self, block: Block, request: ChatRequest) -> int:
        """Return how many tokens may be sampled after a block, at least 1."""
        context = self.scope.context
        limits = [context.max_model_len - block.length, self._num_tokens_left]
        return max(1, min(limits if request.max_tokens is None else [*limits, request.max_tokens]))

    async def _engine_request(self, pending: _PendingRequest, max_tokens: int) -> GenerateRequest:
        context = self.scope.context
        token_ids, images = pending.block.context()
        if images:
            assert context.images is not None, f"{pending.name}: images without a loader"
            images = await context.images.load(images)
        return GenerateRequest(
            request_id=pending.name,
            token_ids=token_ids,
            max_tokens=max_tokens,
            temperature=context.temperature,
            top_p=context.config.top_p,
            top_k=context.config.top_k,
            seed=self._seed(pending, 0),
            stop=pending.request.stop,
            images=images,
            routes_start=pending.block.num_routed if context.with_routes else None,
        )

    def _seed(self, pending: _PendingRequest, piece: int) -> int | None:
        """Return a seed that depends on the context and not on the order of the requests."""
        scope, context = self.scope, self.scope.context
        if not context.temperature:
            return None
        turn = int.from_bytes(pending.block.digest, "big")
        place = (context.step, scope.prompt_key, scope.path, turn, 2 * pending.sample_index + piece)
        return request_seed(context.seed, *place)

    def _add_answer(
        self, pending: _PendingRequest, generation: Generation, *, is_replayed: bool
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
        if is_replayed:
            self._replayed.add(added)
        self._answered[pending.answer_id] = (added, pending.request.num_instructions)
        if self._num_tokens_left < 1 and finish is AnswerFinish.length:
            self._spent = self._spent or StopReason.length
        return self._make_answer(pending, parts, finish, generation)

    def _make_answer(
        self,
        pending: _PendingRequest,
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
