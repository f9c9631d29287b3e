"""An engine that can be told to wait, in the middle of a request: `ports.Generator`.

`hold` ends the running requests where they are and lets no new one begin; `go_on` continues each
behind the tokens it has, with whatever weights are served then. Whoever asked gets one
`Generation` of all pieces, the version kept token by token, and notices nothing else.

`generate` waits for `go_on` and for the engine; unblocked by both or by cancellation. A piece
samples with a seed of its own. A stop string that the border between two pieces cuts in two is
found: the engine looks into one request only, so it is completed token by token here.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.context import FAULTS
from mega_agentrl.rollout.seeds import continued_seed
from mega_agentrl.rollout.speech import ends_inside
from mega_agentrl.types.records import Finish, Generation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.ports import Generator, TextCodec
    from mega_agentrl.types.records import GenerateRequest


class HeldGenerator:
    """One group's way to the engine. num_waiting: calls of `generate` that wait for `go_on`."""

    def __init__(self, generator: Generator, codec: TextCodec) -> None:
        self.num_waiting = 0
        self._generator = generator
        self._codec = codec
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._running: set[str] = set()
        self._cut: set[str] = set()
        self._pieces: dict[str, list[Generation]] = {}

    @property
    def version(self) -> int:
        """See `ports.Generator`."""
        return self._generator.version

    @property
    def can_serve(self) -> bool:
        """See `ports.Generator`."""
        return self._generator.can_serve

    @property
    def is_running(self) -> bool:
        """Whether a request is at the engine."""
        return bool(self._running)

    async def hold(self) -> None:
        """Let no request begin and ask the engine to end the running ones; may be repeated."""
        self._may_run.clear()
        running = sorted(self._running)
        self._cut |= self._running
        for request_id in running:
            with suppress(*FAULTS):  # the request itself says so when the engine is dead
                await self._generator.abort(request_id)

    def go_on(self) -> None:
        """Continue all requests."""
        self._may_run.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `ports.Generator`."""
        pieces = self._pieces[request.request_id] = []
        try:
            while True:
                await self._wait()
                piece = self._rest(request, pieces)
                generation, was_cut = await self._run(piece)
                pieces.append(generation)
                finish, stop = self._finish(request, pieces, piece.max_tokens, was_cut=was_cut)
                if finish is not None:
                    return _joined(pieces, finish, stop)
        finally:
            del self._pieces[request.request_id]

    async def abort(self, request_id: str) -> None:
        """See `ports.Generator`."""
        await self._generator.abort(request_id)

    async def entropies(self, request_id: str) -> tuple[float, ...]:
        """See `ports.Generator`."""
        pieces = self._pieces.get(request_id, ())
        before = tuple(entropy for piece in pieces for entropy in piece.entropies)
        if request_id in self._pieces and request_id not in self._running:
            return before
        return (*before, *await self._generator.entropies(request_id))

    async def pause(self) -> None:
        """See `ports.Generator`."""
        await self._generator.pause()

    async def resume(self) -> None:
        """See `ports.Generator`."""
        await self._generator.resume()

    async def _wait(self) -> None:
        self.num_waiting += 1
        try:
            await self._may_run.wait()
        finally:
            self.num_waiting -= 1

    async def _run(self, piece: GenerateRequest) -> tuple[Generation, bool]:
        """What the engine gave, and whether `hold` ended it."""
        key = piece.request_id
        self._running.add(key)
        try:
            generation = await self._generator.generate(piece)
            return generation, key in self._cut and generation.finish is Finish.aborted
        finally:
            self._running.discard(key)
            self._cut.discard(key)

    def _rest(self, request: GenerateRequest, pieces: Sequence[Generation]) -> GenerateRequest:
        """The request for what is still missing."""
        token_ids = _tokens(pieces)
        if not token_ids:
            return request
        inside = ends_inside(self._codec.decode(token_ids), request.stop)
        return replace(
            request,
            token_ids=(*request.token_ids, *token_ids),
            max_tokens=1 if inside else request.max_tokens - len(token_ids),
            seed=None if request.seed is None else continued_seed(request.seed, len(token_ids)),
        )

    def _finish(
        self,
        request: GenerateRequest,
        pieces: Sequence[Generation],
        asked: int,
        *,
        was_cut: bool,
    ) -> tuple[Finish | None, str | None]:
        """How the whole request ended, and by which stop string; None: it has not.

        asked: tokens that the last piece could have had.
        """
        last = pieces[-1]
        if not was_cut and last.finish is not Finish.length:
            return last.finish, last.stop_string
        token_ids = _tokens(pieces)
        if len(pieces) > 1:
            text = self._codec.decode(token_ids)
            stop = next((stop for stop in request.stop if stop in text), None)
            if stop is not None:
                return Finish.stop, stop
        num_before = len(token_ids) - len(last.token_ids)
        asked_all = not was_cut and num_before + asked >= request.max_tokens
        if asked_all or len(token_ids) >= request.max_tokens:
            return Finish.length, None
        return None, None


def _tokens(pieces: Sequence[Generation]) -> tuple[int, ...]:
    return tuple(token for piece in pieces for token in piece.token_ids)


def _joined(pieces: Sequence[Generation], finish: Finish, stop: str | None) -> Generation:
    """All pieces as one generation."""
    last = pieces[-1]
    if len(pieces) == 1 and last.finish is finish:
        return last
    versions = tuple(piece.version for piece in pieces for _ in piece.token_ids)
    return Generation(
        request_id=last.request_id,
        token_ids=_tokens(pieces),
        logps=tuple(value for piece in pieces for value in piece.logps),
        entropies=tuple(value for piece in pieces for value in piece.entropies),
        argmax_ids=tuple(value for piece in pieces for value in piece.argmax_ids),
        finish=finish,
        stop_string=stop,
        version=last.version,
        top_logps=tuple(row for piece in pieces for row in piece.top_logps),
        versions=versions,
    )
