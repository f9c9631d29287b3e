"""Samples the turns of a session with the engines, in two pieces where its forks are decided."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.context import INFRA_ERRORS
from mega_agentrl.rollout.generation.interruptible import merge_generations
from mega_agentrl.rollout.generation.turn_generator import generate_or_abort, request_seed
from mega_agentrl.types.records import FinishReason, GenerateRequest, Generation

if TYPE_CHECKING:
    from mega_agentrl.rollout.gateway.capture import Block
    from mega_agentrl.rollout.gateway.chat import ChatRequest
    from mega_agentrl.rollout.gateway.session import AgentSession


@dataclass(slots=True, kw_only=True, frozen=True)
class PendingRequest:
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


class TurnSampler:
    """Samples the turns of a session.

    Args:
        session: The session, whose budget of tokens bounds a turn.
    """

    def __init__(self, session: AgentSession) -> None:
        self._session = session
        self._scope = session.scope
        self._engine_ids: set[str] = set()
        """Requests that the engine runs; a turn with a probe takes two."""

    async def sample(self, pending: PendingRequest) -> Generation:
        """Sample one turn, in two pieces if the branch policy asks for a probe.

        Raises:
            GatewayError: the session has ended.
        """
        block, request, session = pending.block, pending.request, self._session
        max_tokens = self._max_tokens(block, request)
        engine_request = await self._engine_request(pending, max_tokens)
        probe = self._scope.probe
        # The engine looks for a stop string in the output of one request only.
        num_probed = 0 if probe is None or request.stop else probe.num_tokens(session, block)
        self._scope.spans.start_turn()
        if probe is None or not 0 < num_probed < max_tokens:
            return await self._generate(engine_request)
        piece = await self._generate(replace(engine_request, max_tokens=num_probed))
        if piece.finish_reason is not FinishReason.aborted and not session.is_closed:
            await probe.on_sampled(session, block, piece)
        if piece.finish_reason is not FinishReason.length:
            return piece
        if session.is_closed:  # perhaps while the forks were made
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

    async def abort(self) -> None:
        """End the running requests of the engine."""
        for engine_id in tuple(self._engine_ids):
            with suppress(*INFRA_ERRORS):
                await self._scope.context.generator.abort(engine_id)

    async def _generate(self, request: GenerateRequest) -> Generation:
        self._session.check_open()
        self._engine_ids.add(request.request_id)
        try:
            generator, clock = self._scope.context.generator, self._scope.tools.clock
            work = generate_or_abort(generator, request, clock)
            return await self._scope.spans.trace_generate(request, work)
        finally:
            self._engine_ids.discard(request.request_id)

    def _max_tokens(self, block: Block, request: ChatRequest) -> int:
        """Return how many tokens may be sampled after a block, at least 1."""
        limits = [self._scope.context.max_model_len - block.length, self._session.num_tokens_left]
        return max(1, min(limits if request.max_tokens is None else [*limits, request.max_tokens]))

    async def _engine_request(self, pending: PendingRequest, max_tokens: int) -> GenerateRequest:
        context = self._scope.context
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

    def _seed(self, pending: PendingRequest, piece: int) -> int | None:
        """Return a seed that depends on the context and not on the order of the requests."""
        scope, context = self._scope, self._scope.context
        if not context.temperature:
            return None
        turn = int.from_bytes(pending.block.digest, "big")
        place = (context.step, scope.prompt_key, scope.path, turn, 2 * pending.sample_index + piece)
        return request_seed(context.seed, *place)
