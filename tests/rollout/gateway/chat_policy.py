"""A random policy over a chat template: turns with reasoning, one or two calls, or an answer."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

from mega_agentrl.types.records import FinishReason, Generation
from tests.fakes import unit

WORDS = ("so", "then", "perhaps", "one more", "the sum")


class ChatPolicy:
    """An engine whose turns and entropies depend on the seed of the request alone.

    Args:
        codec: Encodes the turns.
        call_rate: Share of turns that call `add`.
        fails: Called with the number of a request; whether the engine dies on it.
    """

    version = 1
    can_serve = True

    def __init__(self, codec, *, call_rate=0.6, fails=lambda number: False):
        self.requests = []
        self.sampled = Counter()
        """Number of times that each sampled turn, by context and tokens, left the engine."""
        self._codec = codec
        self._call_rate = call_rate
        self._fails = fails

    async def generate(self, request):
        self.requests.append(request)
        if self._fails(len(self.requests)):
            raise RuntimeError("engine 0 died")
        await asyncio.sleep(0.001 * unit(request.seed, "delay"))
        token_ids = [*self._codec.encode(self._turn(request.seed)), self._codec.eos_id]
        finish = FinishReason.eos
        if len(token_ids) > request.max_tokens:
            token_ids, finish = token_ids[: request.max_tokens], FinishReason.length
        self.sampled[request.token_ids, tuple(token_ids)] += 1
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(token_ids),
            logps=tuple(-unit(request.seed, i) for i in range(len(token_ids))),
            entropies=tuple(4 * unit(request.seed, -i) for i in range(len(token_ids))),
            argmax_ids=tuple(token_ids),
            finish_reason=finish,
            stop_string=None,
            version=1,
        )

    def _turn(self, seed):
        word = WORDS[int(unit(seed, "word") * len(WORDS))]
        thought = f"<think>{word} {seed % 97}</think>" if unit(seed, "thinks") < 0.5 else ""
        if unit(seed, "calls") >= self._call_rate:
            return f"{thought}It is {seed % 101}."
        calls = [
            {"name": "add", "arguments": {"a": seed % 11, "b": int(unit(seed, i) * 9)}}
            for i in range(1 + (unit(seed, "two") < 0.2))
        ]
        blocks = "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
        return f"{thought}{word}{blocks}"

    async def abort(self, request_id):
        pass
