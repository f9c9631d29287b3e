"""What a trajectory asks of the engine: one assistant turn in one or more requests.

Consumes a tape and the context in front of it, appends what was sampled to the tape. Waits for
the engine, which has deadlines of its own; unblocked by its answer, or by cancellation, after
which the running request is aborted. Holds the token budget: no request asks for more than is
left of the trajectory's tokens and of the engine's context length.

A turn may be sampled in parts (a probe, then the rest). Seeds are keyed by the trajectory's
place in the tree, the turn and the part, so nobody else's requests matter.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from mega_agentrl.rollout.context import FAULTS
from mega_agentrl.rollout.estimate import EntropyGap
from mega_agentrl.rollout.seeds import request_seed
from mega_agentrl.rollout.spans import PathSpans
from mega_agentrl.types.records import Finish, GenerateRequest, Restart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.rollout.tape import Tape
    from mega_agentrl.types.ports import Generator
    from mega_agentrl.types.records import Generation, Prompt

ABORT_DEADLINE_S = 2.0


class Speech:
    """The engine requests of one trajectory, which `trajectory_id` and `path` name.

    restarts: see `records.Trajectory`; those of the path so far. parent_id: of a fork. spans: of
    the trajectory.
    """

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        prompt_key: str,
        path: tuple[int, ...],
        tape: Tape,
        restarts: tuple[Restart, ...] = (),
        parent_id: str | None = None,
    ) -> None:
        self.restarts = restarts
        self._context = context
        self._prompt = prompt
        self._prompt_key = prompt_key
        self._path = path
        self._tape = tape
        self._num_parts = 0
        self.spans = PathSpans(context.spans, prompt, self.trajectory_id, context.step, parent_id)
        self._gap = EntropyGap(context.config.branch.estimate_top_k)
        self._max_tokens = min(
            context.config.max_response_tokens, context.max_model_len - len(prompt.token_ids)
        )

    @property
    def trajectory_id(self) -> str:
        """Unique over the run."""
        return f"{self._prompt_key}/{self._context.step}/{'.'.join(map(str, self._path))}"

    @property
    def topk_gap(self) -> float | None:
        """See `records.Trajectory`."""
        return self._gap.mean

    @property
    def room(self) -> int:
        """Tokens the trajectory may still grow by."""
        left = self._max_tokens - len(self._tape)
        if not self.restarts:
            return left
        return min(left, self._context.max_model_len - len(self._before()))

    def restart(self, token_ids: Sequence[int]) -> None:
        """From here on these ids stand in front, instead of prompt and response so far."""
        self.restarts += (Restart(start=len(self._tape), token_ids=tuple(token_ids)),)

    def begin_turn(self) -> None:
        """The next request is the first one of a turn."""
        self._num_parts = 0
        self.spans.begin_turn()

    async def sample(self, max_tokens: int) -> Finish:
        """One engine request, appended to the open turn."""
        context, tape = self._context, self._tape
        turn, part = len(tape.turns), self._num_parts
        self._num_parts += 1
        seed = request_seed(context.seed, context.step, self._prompt_key, self._path, turn, part)
        request = make_request(
            context,
            f"{self.trajectory_id}/{turn}.{part}",
            self._before(),
            max_tokens=max_tokens,
            seed=seed,
            num_top_logps=self._gap.top_k,
        )
        generation = await self.spans.generate(request, ask(context.generator, request))
        num_new = len(generation.token_ids)
        assert num_new <= max_tokens, f"{request.request_id}: {num_new} of {max_tokens} tokens"
        assert num_new or generation.finish is Finish.aborted, f"{request.request_id}: no token"
        tape.add_sampled(generation)
        self._gap.add(generation)
        return generation.finish

    async def rest_of_turn(self, finish: Finish, start: int) -> Finish:
        """Sample on after a first part that ended by `finish`; the turn began at `start`."""
        decode, stops = self._context.codec.decode, self._context.tools.stop_strings
        while finish is Finish.length and self.room:
            text = decode(self._tape.token_ids[start:])
            if not ends_inside(text, stops):
                return await self.sample(self.room)
            # The engine looks for a closing tag in one request's output only: a tag that the
            # first part cut in two is completed token by token.
            finish = await self.sample(1)
            text = decode(self._tape.token_ids[start:])
            if finish is Finish.length and any(stop in text for stop in stops):
                return Finish.stop
        return finish

    def _before(self) -> tuple[int, ...]:
        """The ids in front of the next token."""
        if not self.restarts:
            return (*self._prompt.token_ids, *self._tape.token_ids)
        last = self.restarts[-1]
        return (*last.token_ids, *self._tape.token_ids[last.start :])


def make_request(
    context: RolloutContext,
    request_id: str,
    token_ids: tuple[int, ...],
    *,
    max_tokens: int,
    seed: int,
    num_top_logps: int,
) -> GenerateRequest:
    """A request as the run samples; a greedy one has no seed."""
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


async def ask(generator: Generator, request: GenerateRequest) -> Generation:
    """Run the request; aborts it when cancelled. Raises what `Generator.generate` does."""
    try:
        return await generator.generate(request)
    except asyncio.CancelledError:
        with suppress(*FAULTS):
            async with asyncio.timeout(ABORT_DEADLINE_S):
                await generator.abort(request.request_id)
        raise


def ends_inside(text: str, stops: Sequence[str]) -> bool:
    """True where the text ends in the beginning of a stop string."""
    return any(text.endswith(stop[:size]) for stop in stops for size in range(1, len(stop)))
