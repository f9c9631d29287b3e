"""A generator whose requests can be interrupted and continued later.

`interrupt_requests` ends the running requests at their current token and blocks new ones.
`continue_requests` continues each after its last token, with the weights that are served by then.
The caller of `generate` gets one `Generation` merged from all pieces, with the weight version of
each token.

Each piece samples with its own seed. The engine looks for stop strings in the output of one request
only, so a stop string that is split between two pieces is completed token by token.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.context import INFRA_ERRORS
from mega_agentrl.rollout.generation.turn_generator import continuation_seed, ends_with_partial_stop
from mega_agentrl.types.records import FinishReason, Generation
from mega_agentrl.types.routes import join_routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.protocols import Generator, TextCodec
    from mega_agentrl.types.records import GenerateRequest


class InterruptibleGenerator:
    """Wraps the generator of one group; implements `Generator`."""

    def __init__(self, generator: Generator, codec: TextCodec) -> None:
        self.num_waiting = 0
        """Calls of `generate` that wait for `continue_requests`."""
        self._generator = generator
        self._codec = codec
        self._run_allowed = asyncio.Event()
        self._run_allowed.set()
        self._running_ids: set[str] = set()
        self._interrupted_ids: set[str] = set()

    @property
    def version(self) -> int:
        """Weight version that the engine serves now."""
        return self._generator.version

    @property
    def can_serve(self) -> bool:
        """Whether the engine takes requests."""
        return self._generator.can_serve

    @property
    def has_running_requests(self) -> bool:
        """Whether the engine is running a request."""
        return bool(self._running_ids)

    async def interrupt_requests(self) -> None:
        """Block new requests and ask the engine to end the running ones; may be repeated."""
        self._run_allowed.clear()
        running = sorted(self._running_ids)
        self._interrupted_ids |= self._running_ids
        for request_id in running:
            with suppress(*INFRA_ERRORS):  # the request itself raises if the engine is dead
                await self._generator.abort(request_id)

    def continue_requests(self) -> None:
        """Continue all interrupted requests and unblock new ones."""
        self._run_allowed.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Run one request to its end, over any number of interruptions."""
        pieces: list[Generation] = []
        while True:
            await self._wait_until_allowed()
            piece = self._remaining_request(request, pieces)
            generation, was_interrupted = await self._run_piece(piece)
            pieces.append(generation)
            finish, stop = self._combined_finish(
                request, pieces, piece.max_tokens, was_interrupted=was_interrupted
            )
            if finish is not None:
                return merge_generations(pieces, finish, stop)

    async def abort(self, request_id: str) -> None:
        """End a running request."""
        await self._generator.abort(request_id)

    async def pause(self) -> None:
        """Pause the engine."""
        await self._generator.pause()

    async def resume(self) -> None:
        """Resume the engine."""
        await self._generator.resume()

    async def _wait_until_allowed(self) -> None:
        self.num_waiting += 1
        try:
            await self._run_allowed.wait()
        finally:
            self.num_waiting -= 1

    async def _run_piece(self, piece: GenerateRequest) -> tuple[Generation, bool]:
        """Run one piece; return its generation and whether it was interrupted."""
        key = piece.request_id
        self._running_ids.add(key)
        try:
            generation = await self._generator.generate(piece)
            return (
                generation,
                key in self._interrupted_ids and generation.finish_reason is FinishReason.aborted,
            )
        finally:
            self._running_ids.discard(key)
            self._interrupted_ids.discard(key)

    def _remaining_request(
        self, request: GenerateRequest, pieces: Sequence[Generation]
    ) -> GenerateRequest:
        """Return the request for the rest of the tokens."""
        token_ids = _concat_token_ids(pieces)
        if not token_ids:
            return request
        ends_in_partial_stop = ends_with_partial_stop(self._codec.decode(token_ids), request.stop)
        return replace(
            request,
            token_ids=(*request.token_ids, *token_ids),
            max_tokens=1 if ends_in_partial_stop else request.max_tokens - len(token_ids),
            seed=None if request.seed is None else continuation_seed(request.seed, len(token_ids)),
            routes_start=_next_routes_start(request, pieces),
        )

    def _combined_finish(
        self,
        request: GenerateRequest,
        pieces: Sequence[Generation],
        piece_max_tokens: int,
        *,
        was_interrupted: bool,
    ) -> tuple[FinishReason | None, str | None]:
        """Return how the whole request ended and its stop string; None if it continues.

        `piece_max_tokens` and `was_interrupted` are of the last piece.
        """
        last = pieces[-1]
        if not was_interrupted and last.finish_reason is not FinishReason.length:
            return last.finish_reason, last.stop_string
        token_ids = _concat_token_ids(pieces)
        if len(pieces) > 1:
            text = self._codec.decode(token_ids)
            stop = next((stop for stop in request.stop if stop in text), None)
            if stop is not None:
                return FinishReason.stop, stop
        num_before = len(token_ids) - len(last.token_ids)
        is_last_piece = not was_interrupted and num_before + piece_max_tokens >= request.max_tokens
        if is_last_piece or len(token_ids) >= request.max_tokens:
            return FinishReason.length, None
        return None, None


def _concat_token_ids(pieces: Sequence[Generation]) -> tuple[int, ...]:
    return tuple(token for piece in pieces for token in piece.token_ids)


def _next_routes_start(request: GenerateRequest, pieces: Sequence[Generation]) -> int | None:
    """Return the first token whose routes no piece has."""
    known = [piece.routes.stop for piece in pieces if piece.routes is not None]
    return known[-1] if known else request.routes_start


def merge_generations(
    pieces: Sequence[Generation], finish: FinishReason, stop: str | None
) -> Generation:
    """Merge all pieces into one generation."""
    last = pieces[-1]
    if len(pieces) == 1 and last.finish_reason is finish:
        return last
    versions = tuple(
        version
        for piece in pieces
        for version in piece.versions or (piece.version,) * len(piece.token_ids)
    )
    routes = [piece.routes for piece in pieces if piece.routes is not None]
    return Generation(
        request_id=last.request_id,
        token_ids=_concat_token_ids(pieces),
        logps=tuple(value for piece in pieces for value in piece.logps),
        entropies=tuple(value for piece in pieces for value in piece.entropies),
        argmax_ids=tuple(value for piece in pieces for value in piece.argmax_ids),
        finish_reason=finish,
        stop_string=stop,
        version=last.version,
        top_logps=tuple(row for piece in pieces for row in piece.top_logps),
        versions=versions,
        routes=join_routes(routes) if routes else None,
    )


def truncate_generation(generation: Generation, max_tokens: int) -> Generation:
    """Return the first `max_tokens` of a generation, which then ends for length."""
    num_dropped = len(generation.token_ids) - max_tokens
    if num_dropped <= 0:
        return generation
    routes = generation.routes
    return replace(
        generation,
        token_ids=generation.token_ids[:max_tokens],
        logps=generation.logps[:max_tokens],
        entropies=generation.entropies[:max_tokens],
        argmax_ids=generation.argmax_ids[:max_tokens],
        finish_reason=FinishReason.length,
        stop_string=None,
        version=generation.versions[max_tokens - 1] if generation.versions else generation.version,
        top_logps=generation.top_logps[:max_tokens],
        versions=generation.versions[:max_tokens],
        routes=None if routes is None else routes.before(routes.stop - num_dropped),
    )
