"""Sleep mode: frees an engine's GPU memory for a trainer on the same GPUs (`cluster.colocated`).

    any          -> `sleep`                 -> asleep        weights and KV cache are freed
    asleep       -> `wake("weights")`       -> weights_only  memory for the weights, undefined
                    `mark_weights_verified`                  the weights have arrived
    weights_only -> `wake("cache")`         -> awake         an empty KV cache

This is vLLM's sleep mode at level 2, which drops the weights, because new ones arrive by weight
transfer anyway. Level 1 would keep a copy of every engine's weights in pinned host memory that
nobody reads. CUDA's context, communicators, CUDA graphs and transfer buckets remain on the GPU.

On a CPU, vLLM has no sleep mode: the states are the same but no memory is freed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_SLEEP_LEVEL = 2


class MemoryState(Enum):
    """Tells whether an engine's weights and KV cache have GPU memory."""

    awake = auto()
    weights_only = auto()
    asleep = auto()


_WAKE_TRANSITIONS = {
    "weights": (MemoryState.asleep, "weights", MemoryState.weights_only),
    "cache": (MemoryState.weights_only, "kv_cache", MemoryState.awake),
}
"""State before, vLLM's tag and state after, by the part to wake."""


class SleepController:
    """Puts one engine to sleep and wakes it.

    Args:
        llm: The vLLM engine.
        await_vllm: Awaits a call to vLLM and raises if vLLM dies.
        has_sleep_mode: Whether vLLM was started with its sleep mode.
        has_weights: Whether vLLM has loaded the weights of a model folder.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        await_vllm: Callable[[Awaitable[Any]], Awaitable[Any]],
        *,
        has_sleep_mode: bool,
        has_weights: bool,
    ) -> None:
        self._llm = llm
        self._await_vllm = await_vllm
        self._has_sleep_mode = has_sleep_mode
        self._state = MemoryState.awake
        self._has_verified_weights = has_weights

    @property
    def state(self) -> MemoryState:
        """Current state of GPU memory."""
        return self._state

    @property
    def can_compute(self) -> bool:
        """Whether weights and KV cache are present, and the weights are the policy's."""
        return self._state is MemoryState.awake and self._has_verified_weights

    async def sleep(self) -> None:
        """Free weights and KV cache. Nothing may be running; may be called twice."""
        if self._state is MemoryState.asleep:
            return
        self._has_verified_weights = False
        if self._has_sleep_mode:
            await self._await_vllm(self._llm.sleep(level=_SLEEP_LEVEL, mode="wait"))
        self._state = MemoryState.asleep

    async def wake(self, part: str) -> None:
        """Allocate memory for `part` unless it is allocated: "weights", then an empty "cache".

        Raises:
            RuntimeError: For the cache, if the weights have not arrived.
        """
        if part == "cache" and not self._has_verified_weights:
            raise RuntimeError(
                "the KV cache cannot wake before the weights: expected a verified weight update "
                "first"
            )
        before, tag, after = _WAKE_TRANSITIONS[part]
        if self._state is before:
            if self._has_sleep_mode:
                await self._await_vllm(self._llm.wake_up([tag]))
            self._state = after

    def mark_weights_verified(self) -> None:
        """Record that weights have arrived and are verified."""
        self._has_verified_weights = True
