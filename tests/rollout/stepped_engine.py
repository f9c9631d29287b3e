"""Engines that write one token at a time and can be interrupted in between, or write nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mega_agentrl.rollout.generation.interruptible import truncate_generation
from mega_agentrl.types.records import FinishReason
from tests.fakes import FakeGenerator


@dataclass
class SteppedGenerator(FakeGenerator):
    """`abort` ends a request behind the token it has.

    stalls(request, num_tokens): whether it writes no more tokens than that for now.
    """

    stalls: Callable = lambda request, num_tokens: False
    abort_requested: set = field(default_factory=set)

    async def generate(self, request):
        version = self.version
        whole = await super().generate(request)
        key = request.request_id
        assert key not in self.running
        self.running.add(key)
        try:
            for num_tokens in range(len(whole.token_ids)):
                await asyncio.sleep(0)
                while self.stalls(request, num_tokens) and key not in self.abort_requested:
                    await asyncio.sleep(0.001)
                if key in self.abort_requested:
                    return replace(_first(whole, num_tokens), version=version)
            assert version == self.version, "weights changed in the middle of a request"
            return replace(whole, version=version)
        finally:
            self.running.discard(key)
            self.abort_requested.discard(key)

    async def abort(self, request_id):
        await super().abort(request_id)
        if request_id in self.running:
            self.abort_requested.add(request_id)


@dataclass
class HeldGenerator(FakeGenerator):
    """Goes on with its requests when the weights change: a token has the version of its moment.

    Requests of the second step that have begun before the first update wait for it after their
    first token.
    """

    num_changed: int = 0
    """Requests so far whose tokens have more than one version."""
    first_version: int | None = None
    holds_second_step: threading.Event = field(default_factory=threading.Event)
    """Set when a request of the second step waits or has got past that point."""

    async def generate(self, request):
        whole = await super().generate(request)
        if self.first_version is None:
            self.first_version = self.version
        versions = []
        for _ in whole.token_ids:
            await asyncio.sleep(0.001)
            versions.append(self.version)
            if len(versions) == 1 and "/train-2/" in request.request_id:
                self.holds_second_step.set()
                await asyncio.wait_for(self._first_update(), 120)
        self.num_changed += versions[0] != versions[-1]
        return replace(whole, version=versions[-1], versions=tuple(versions))

    async def _first_update(self):
        while self.version == self.first_version:
            await asyncio.sleep(0.001)


class StuckGenerator(FakeGenerator):
    """Answers no request."""

    async def generate(self, request):
        self.requests.append(request)
        await asyncio.sleep(60)


def _first(whole, num_tokens):
    first = truncate_generation(whole, num_tokens)
    return replace(first, finish_reason=FinishReason.aborted, stop_string=None)
