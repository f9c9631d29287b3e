"""Engine requests of one trajectory.

An assistant turn takes one or more requests, for example a probe and the rest. Sampled tokens are
appended to the token buffer. No request asks for more tokens than are left of the trajectory's
budget and of the engine's context length. Cancellation aborts the running request.

The seed of a request depends only on the trajectory's path, the turn and the part of the turn, so
requests of other trajectories do not affect it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from mega_agentrl.rollout.branching.topk_entropy import TopkEntropyGap
from mega_agentrl.rollout.context import INFRA_ERRORS
from mega_agentrl.rollout.generation.seeds import request_seed
from mega_agentrl.rollout.tracing import TrajectorySpans
from mega_agentrl.types.records import ContextReset, FinishReason, GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
    from mega_agentrl.types.protocols import Generator
    from mega_agentrl.types.records import Generation, Prompt

ABORT_TIMEOUT_S = 2.0
"""Maximum wait for an engine to abort the request of a cancelled trajectory."""


class TurnGenerator:
    """Sends the engine requests of one trajectory.

    Args:
        context: The shared context of the pass.
        prompt: The prompt.
        prompt_key: Name of the prompt, unique in the pass.
        path: Position in the tree.
        token_buffer: Receives the sampled tokens.
        context_resets: Context resets of the path so far.
        parent_id: Id of the trajectory it was forked from; None for a root.
    """

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        prompt_key: str,
        path: tuple[int, ...],
        token_buffer: TokenBuffer,
        context_resets: tuple[ContextReset, ...] = (),
        parent_id: str | None = None,
    ) -> None:
        self.context_resets = context_resets
        self._context = context
        self._prompt = prompt
        self._prompt_key = prompt_key
        self._path = path
        self._token_buffer = token_buffer
        self._num_requests_in_turn = 0
        self.spans = TrajectorySpans(
            context.spans, prompt, self.trajectory_id, context.step, parent_id
        )
        self._entropy_gap = TopkEntropyGap(context.config.branch.entropy_estimate_top_k)
        self._max_tokens = min(
            context.config.max_response_tokens, context.max_model_len - len(prompt.token_ids)
        )

    @property
    def trajectory_id(self) -> str:
        """Unique id within the run."""
        return f"{self._prompt_key}/{self._context.step}/{'.'.join(map(str, self._path))}"

    @property
    def topk_entropy_error(self) -> float | None:
        """Mean absolute error of the top-k entropy estimate, nats; None if not measured."""
        return self._entropy_gap.mean

    @property
    def num_tokens_left(self) -> int:
        """Number of tokens that may still be appended."""
        left = self._max_tokens - len(self._token_buffer)
        if not self.context_resets:
            return left
        return min(left, self._context.max_model_len - len(self._context_ids()))

    def replace_context(self, token_ids: Sequence[int]) -> None:
        """Continue behind `token_ids` instead of prompt and response so far."""
        self.context_resets += (
            ContextReset(start=len(self._token_buffer), token_ids=tuple(token_ids)),
        )

    def start_turn(self) -> None:
        """Start a turn: the next request is its first."""
        self._num_requests_in_turn = 0
        self.spans.start_turn()

    async def sample(self, max_tokens: int) -> FinishReason:
        """Run one engine request and append its tokens to the open turn."""
        context, buffer = self._context, self._token_buffer
        turn, part = len(buffer.turns), self._num_requests_in_turn
        self._num_requests_in_turn += 1
        seed = request_seed(context.seed, context.step, self._prompt_key, self._path, turn, part)
        request = build_request(
            context,
            f"{self.trajectory_id}/{turn}.{part}",
            self._context_ids(),
            max_tokens=max_tokens,
            seed=seed,
            num_top_logps=self._entropy_gap.top_k,
        )
        generation = await self.spans.trace_generate(
            request, generate_or_abort(context.generator, request)
        )
        num_new = len(generation.token_ids)
        assert num_new <= max_tokens, f"{request.request_id}: {num_new} of {max_tokens} tokens"
        assert num_new or generation.finish_reason is FinishReason.aborted, (
            f"{request.request_id}: no token"
        )
        buffer.append_sampled(generation)
        self._entropy_gap.add(generation)
        return generation.finish_reason

    async def finish_turn(self, finish: FinishReason, start: int) -> FinishReason:
        """Sample the rest of a turn.

        Args:
            finish: How the part sampled so far ended.
            start: Index of the first token of the turn.
        """
        decode, stops = self._context.codec.decode, self._context.tools.stop_strings
        while finish is FinishReason.length and self.num_tokens_left:
            text = decode(self._token_buffer.token_ids[start:])
            if not ends_with_partial_stop(text, stops):
                return await self.sample(self.num_tokens_left)
            # The engine looks for a closing tag in the output of one request only: a tag that is
            # split between two requests is completed token by token.
            finish = await self.sample(1)
            text = decode(self._token_buffer.token_ids[start:])
            if finish is FinishReason.length and any(stop in text for stop in stops):
                return FinishReason.stop
        return finish

    def _context_ids(self) -> tuple[int, ...]:
        """Return the ids in front of the next token."""
        if not self.context_resets:
            return (*self._prompt.token_ids, *self._token_buffer.token_ids)
        last = self.context_resets[-1]
        return (*last.token_ids, *self._token_buffer.token_ids[last.start :])


def build_request(
    context: RolloutContext,
    request_id: str,
    token_ids: tuple[int, ...],
    *,
    max_tokens: int,
    seed: int,
    num_top_logps: int,
) -> GenerateRequest:
    """Build a request with the sampling settings of the run; greedy requests have no seed."""
    return GenerateRequest(
        request_id=request_id,
        token_ids=token_ids,
        max_tokens=max_tokens,
        temperature=context.temperature,
        top_p=context.config.top_p,
        top_k=context.config.top_k,
        seed=seed if context.temperature else None,
        stop=context.tools.stop_strings,
        num_top_logps=num_top_logps,
    )


async def generate_or_abort(generator: Generator, request: GenerateRequest) -> Generation:
    """Run the request, and abort it on cancellation."""
    try:
        return await generator.generate(request)
    except asyncio.CancelledError:
        with suppress(*INFRA_ERRORS):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await generator.abort(request.request_id)
        raise


def ends_with_partial_stop(text: str, stops: Sequence[str]) -> bool:
    """Return whether the text ends in a proper prefix of a stop string."""
    return any(text.endswith(stop[:size]) for stop in stops for size in range(1, len(stop)))
