"""What of an engine's memory is on its GPUs, where it shares them (`cluster.colocated`).

    any     -> `give_up`         -> empty      weights and KV cache are gone
    empty   -> `wake("weights")` -> weights    room for the weights; what is in it is undefined
               `filled`                        the weights have come, and are proven
    weights -> `wake("cache")`   -> whole      an empty KV cache

It is vLLM's sleep mode at level 2, which drops the weights: the next ones always come over the
bridge, and one GPU's memory is a nearer source than the host. Level 1 would keep a copy of every
engine's weights in pinned host memory, beside the policy's and its optimizer's, that nobody reads.
What stays on the GPU: CUDA's context, communicators, CUDA graphs, buckets of the weight transfer.

On a CPU vLLM has no sleep mode. The states are the same there and nothing is given back; only the
prefix cache has been dropped, by the pause before. So a machine without a GPU shows the order of
things and none of the memory: that the memory is freed, how long it takes, and that the weights
can be loaded into what was given up is for a GPU to show.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_LEVEL = 2


class Held(Enum):
    """See the module."""

    whole = auto()
    weights = auto()
    empty = auto()


_WAKING = {
    "weights": (Held.empty, "weights", Held.weights),
    "cache": (Held.weights, "kv_cache", Held.whole),
}
"""By part: before, the tag that vLLM knows it by, after."""


class HeldMemory:
    """Of one engine. sleeps: vLLM was started with its sleep mode.

    ask: awaits what vLLM answers, with its death noticed.
    """

    def __init__(
        self, llm: AsyncLLM, ask: Callable[[Awaitable[Any]], Awaitable[Any]], *, sleeps: bool
    ) -> None:
        self._llm = llm
        self._ask = ask
        self._sleeps = sleeps
        self._held = Held.whole
        self._is_filled = True

    @property
    def held(self) -> Held:
        """What is on the GPU."""
        return self._held

    @property
    def can_compute(self) -> bool:
        """Whether weights and KV cache are there, and the weights are of the policy."""
        return self._held is Held.whole and self._is_filled

    async def give_up(self) -> None:
        """Free what can be freed; nothing runs. Safe to call twice."""
        if self._held is Held.empty:
            return
        self._is_filled = False
        if self._sleeps:
            await self._ask(self._llm.sleep(level=_LEVEL, mode="wait"))
        self._held = Held.empty

    async def wake(self, part: str) -> None:
        """Have room for the `weights`, or beside them an empty `cache`, if there is none.

        Raises `RuntimeError` for the cache where the weights have not come.
        """
        if part == "cache" and not self._is_filled:
            raise RuntimeError(
                "the KV cache was to wake before the weights: expected a proven weight update first"
            )
        before, tag, after = _WAKING[part]
        if self._held is before:
            if self._sleeps:
                await self._ask(self._llm.wake_up([tag]))
            self._held = after

    def filled(self) -> None:
        """Note that proven weights have come."""
        self._is_filled = True
