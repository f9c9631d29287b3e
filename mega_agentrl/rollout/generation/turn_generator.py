"""Engine requests of one trajectory.

An assistant turn takes one or more requests, for example a probe and the rest. Sampled tokens are
appended to the token buffer. No request asks for more tokens than are left of the trajectory's
budget and of the engine's context length. Cancellation aborts the running request.

The seed of a request is a hash of run seed, step, prompt key, tree path, turn, and index of the
request in the turn. A tree therefore does not depend on scheduling, other prompts or the process.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo.branching import token_entropy_topk
from mega_agentrl.rollout.clock import TrajectoryClock
from mega_agentrl.rollout.context import INFRA_ERRORS
from mega_agentrl.rollout.tracing import TrajectorySpans
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import ContextReset, FinishReason, GenerateRequest, StopReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
    from mega_agentrl.types.images import PlacedImage
    from mega_agentrl.types.protocols import Generator
    from mega_agentrl.types.records import Generation, Prompt

ABORT_TIMEOUT_S = 2.0
"""Maximum wait for an engine to abort the request of a cancelled trajectory."""

SEED_BITS = 63  # engines and torch take a non-negative int64


class TurnGenerator:
    """Sends the engine requests of one trajectory.

    Args:
        prompt_key: Name of the prompt, unique in the pass.
        token_buffer: Receives the sampled tokens.
        context_resets: Context resets of the path so far.
        parent_id: Id of the trajectory it was forked from; None for a root.
        clock: Counts the time of the requests; None counts it nowhere.
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
        clock: TrajectoryClock | None = None,
    ) -> None:
        self.context_resets = context_resets
        self._context = context
        self._clock = clock or TrajectoryClock()
        self._prompt = prompt
        self._prompt_key = prompt_key
        self._path = path
        self._token_buffer = token_buffer
        self._turn = 0
        self._num_requests_in_turn = 0
        self.spans = TrajectorySpans(
            context.spans, prompt, self.trajectory_id, context.step, parent_id
        )
        self._entropy_gap = TopkEntropyError(context.config.branch.entropy_estimate_top_k)
        self._max_tokens = context.max_response_tokens(prompt)

    @property
    def trajectory_id(self) -> str:
        """Unique id within the run."""
        return self._context.trajectory_id(self._prompt_key, self._path)

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

    def replace_context(
        self, token_ids: Sequence[int], images: tuple[PlacedImage, ...] = ()
    ) -> None:
        """Continue after `token_ids`, with these images, instead of prompt and response so far."""
        start = len(self._token_buffer)
        self.context_resets += (
            ContextReset(start=start, token_ids=tuple(token_ids), images=images),
        )

    async def sample(self, max_tokens: int) -> FinishReason:
        """Run one engine request and append its tokens to the open turn."""
        generation = await self.generate(max_tokens, num_top_logps=self._entropy_gap.top_k)
        num_new = len(generation.token_ids)
        name = generation.request_id
        assert num_new <= max_tokens, f"{name}: {num_new} of {max_tokens} tokens"
        assert num_new or generation.finish_reason is FinishReason.aborted, f"{name}: no token"
        self._token_buffer.append_sampled(generation)
        self._entropy_gap.add(generation)
        return generation.finish_reason

    async def generate(self, max_tokens: int, *, num_top_logps: int) -> Generation:
        """Run the next request of the turn, and abort it on cancellation.

        Greedy requests have no seed.

        Raises:
            ToolSessionError: an image of the context cannot be loaded.
        """
        context = self._context
        turn = len(self._token_buffer.turns)
        if turn != self._turn:
            self._turn, self._num_requests_in_turn = turn, 0
        index = self._num_requests_in_turn
        self._num_requests_in_turn += 1
        seed = request_seed(context.seed, context.step, self._prompt_key, self._path, turn, index)
        request = GenerateRequest(
            request_id=f"{self.trajectory_id}/{turn}.{index}",
            token_ids=self._context_ids(),
            max_tokens=max_tokens,
            temperature=context.temperature,
            top_p=context.config.top_p,
            top_k=context.config.top_k,
            seed=seed if context.temperature else None,
            stop=context.tools.stop_strings,
            num_top_logps=num_top_logps,
            images=await self._context_images(),
            routes_start=self._routes_start(),
        )
        work = generate_or_abort(context.generator, request, self._clock, self._add_cut)
        return await self.spans.trace_generate(request, work)

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

    def _add_cut(self, generation: Generation) -> None:
        """Append what was sampled until the trajectory's time was over."""
        if generation.token_ids:
            self._token_buffer.append_sampled(generation)

    def _context_ids(self) -> tuple[int, ...]:
        """Return the ids before the next token."""
        if not self.context_resets:
            return (*self._prompt.token_ids, *self._token_buffer.token_ids)
        last = self.context_resets[-1]
        return (*last.token_ids, *self._token_buffer.token_ids[last.start :])

    def _routes_start(self) -> int | None:
        if not self._context.with_routes:
            return None
        return self._token_buffer.num_routed(
            self.context_resets[-1].start if self.context_resets else 0
        )

    async def _context_images(self) -> tuple[PlacedImage, ...]:
        """Return the images before the next token, with their pixels."""
        prompt, images = self._prompt, self._token_buffer.images
        first, start, offset = prompt.images, 0, len(prompt.token_ids)
        if self.context_resets:
            last = self.context_resets[-1]
            first, start, offset = last.images, last.start, len(last.token_ids) - last.start
        if not first and not images:
            return ()
        placed = (*first, *(item.shifted(offset) for item in images if item.start >= start))
        loader = self._context.images
        assert loader is not None, f"{self.trajectory_id}: images without a loader"
        return await loader.load(placed)


async def generate_or_abort(
    generator: Generator,
    request: GenerateRequest,
    clock: TrajectoryClock,
    on_cut: Callable[[Generation], None] | None = None,
) -> Generation:
    """Run the request, and abort it on cancellation.

    Args:
        generator: Runs it.
        request: The request.
        clock: Counts its time.
        on_cut: Called with what it has sampled if it is cancelled because the time is over.
    """
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    clock.begin_sampling()
    num_tokens = 0
    work = asyncio.Task(generator.generate(request), loop=loop, eager_start=True)
    try:
        if not work.done():
            await asyncio.wait({work})
        generation = work.result()
        num_tokens = len(generation.token_ids)
        if generation.finish_reason is not FinishReason.aborted:
            clock.speed.add(loop.time() - start_s, num_tokens)
    except asyncio.CancelledError:
        cut = await _abort(generator, request.request_id, work, keeps_result=clock.is_over)
        num_tokens = len(cut.token_ids) if cut is not None else 0
        if cut is not None and on_cut is not None:
            on_cut(cut)
        raise
    finally:
        clock.end_sampling(num_tokens)
    return generation


async def _abort(
    generator: Generator, request_id: str, work: asyncio.Future[Generation], *, keeps_result: bool
) -> Generation | None:
    """Abort a request; return what it has sampled, if that is asked for and comes in time."""
    if not keeps_result:
        work.cancel()
    try:
        with suppress(*INFRA_ERRORS):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await generator.abort(request_id)
                await asyncio.wait({work})
    finally:
        work.cancel()
    if not work.done() or work.cancelled() or work.exception() is not None:
        return None
    return work.result()


def request_failure(error: BaseException) -> StopReason:
    """Return how an infrastructure error of a request ends its trajectory.

    It is `aborted`, which never stops the run, if the engine failed. An image that cannot be loaded
    is no fault of the engine. Neither is a `RecursionError`, although it is a `RuntimeError`: code
    of this process raises it, and would raise it again.
    """
    is_ours = isinstance(error, ToolSessionError | RecursionError)
    return StopReason.tool_failure if is_ours else StopReason.aborted


def ends_with_partial_stop(text: str, stops: Sequence[str]) -> bool:
    """Return whether the text ends in a proper prefix of a stop string."""
    return any(text.endswith(stop[:size]) for stop in stops for size in range(1, len(stop)))


class TopkEntropyError:
    """Error of the top-k estimate of token entropies over a trajectory; `top_k` 0 disables it.

    Released branching code estimates entropies from the K most probable tokens that an engine
    lists; `algo.branching.token_entropy_topk` treats the remaining probability as one outcome. If
    `rollout.branch.entropy_estimate_top_k` is set, the estimate is compared with the engine's exact
    entropy. This is a measurement only and does not affect branching.
    """

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._gap_sum = 0.0
        self._num_tokens = 0

    @property
    def mean(self) -> float | None:
        """Mean of |estimate - exact| in nats; None without tokens."""
        return self._gap_sum / self._num_tokens if self._num_tokens else None

    def add(self, generation: Generation) -> None:
        """Add the tokens of a generation; it is skipped if it has no `top_logps`."""
        if not self.top_k or not generation.top_logps:
            return
        rows = [sorted(row, reverse=True)[: self.top_k] for row in generation.top_logps]
        logprob_TK = pad_top_logps(rows, self.top_k)
        exact_T = torch.tensor(generation.entropies, dtype=torch.float64)
        self._gap_sum += float((token_entropy_topk(logprob_TK) - exact_T).abs().sum())
        self._num_tokens += len(rows)


def pad_top_logps(rows: Sequence[Sequence[float]], width: int) -> torch.Tensor:
    """Return log-probs of listed tokens as `[T, width]` in float64, padded with -inf."""
    padded = [[*row, *[-inf] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.float64).reshape(len(rows), width)


def request_seed(
    seed: int, step: int | str, prompt_key: str, path: tuple[int, ...], turn: int, index: int
) -> int:
    """Return the seed of a request, in [0, 2^63), from the run's seed.

    `step` is the name of the pass, and `index` that of the request in its turn: a turn with a probe
    takes several requests.
    """
    return _hash_to_seed(seed, step, prompt_key, path, turn, index)


def continuation_seed(seed: int, num_tokens: int) -> int:
    """Return the seed for continuing a request with this seed after `num_tokens` tokens."""
    return _hash_to_seed(seed, num_tokens)


def _hash_to_seed(*key: object) -> int:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
