"""A vLLM engine that records the calls it gets, answers them as told, and dies when told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from vllm.outputs import CompletionOutput
from vllm.v1.engine.exceptions import EngineDeadError

NEVER = "never"
"""In place of an answer: the engine dies and leaves the call unanswered."""


class FakeVllm:
    """`answers` of its workers, in order; an exception is raised and ends the engine."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), []
        self.errored = self.is_dead = False
        self.output_processor = SimpleNamespace(request_states={})
        self.can_finish = asyncio.Event()
        """Set by the test: requests end, without a token."""

    async def generate(self, prompt, params, key):
        self.calls.append(f"generate {key}")
        await self.can_finish.wait()
        output = CompletionOutput(0, "", [], None, None, finish_reason="length")
        yield SimpleNamespace(num_cached_tokens=0, outputs=[output])

    async def abort(self, key):
        self.calls.append(f"abort {key}")

    async def collective_rpc(self, method, args=()):
        self.calls.append(method)
        answer = self.answers.pop(0) if self.answers else None
        self.is_dead |= answer is NEVER or isinstance(answer, Exception)
        if answer is NEVER:
            self.errored = True
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pause_generation(self, mode, clear_cache):
        if self.is_dead:
            raise EngineDeadError
        self.calls.append("pause_generation")

    async def sleep(self, level, mode):
        self.calls.append(f"sleep {level} {mode}")

    async def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")
