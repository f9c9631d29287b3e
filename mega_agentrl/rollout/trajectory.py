"""One trajectory as one asyncio task: PENDING, GENERATING, TOOL_CALLING, COMPLETED or FAILED.

Consumes a prompt (or the prefix of the trajectory it forks from), produces a `Trajectory`.
Waits for the engine and for its tools, each behind a port with its own deadlines; unblocked
by their answers or by cancellation, after which the tools are released and the running
request is aborted.

A turn: sample until a closing tag, the end of the turn, or the token budget; run the call it
ends in; append the answer with loss mask 0. Budgets are the trajectory's own and exact: tool
answers count, and an answer that does not fit is cut with a note. After an answer the branch
policy may ask for a probe of k tokens and then for forks right behind the answer; the probed
tokens stay with this trajectory. A fault of engine or tools ends the trajectory as failed, one
of a tool with its outcome as the last turn, without tokens; anything else that raises is a bug
and passes through. Scores nothing.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from mega_agentrl.rollout.branching import ForkPoint, split_evenly
from mega_agentrl.rollout.seeds import request_seed
from mega_agentrl.rollout.tape import Tape
from mega_agentrl.types.faults import ToolFault
from mega_agentrl.types.records import Finish, GenerateRequest, StopReason, ToolStatus, Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.config.schema import RolloutConfig
    from mega_agentrl.rollout.branching import BranchPolicy
    from mega_agentrl.types.ports import Generator, TextCodec, ToolProvider, ToolSession
    from mega_agentrl.types.records import Prompt, ToolCall, ToolOutcome

FAULTS = (RuntimeError, OSError)
"""What engines and tools raise when they, and not the policy, failed (see `types.ports`)."""

CUT_NOTE = "... [cut]"
ABORT_DEADLINE_S = 2.0

_log = logging.getLogger(__name__)


class State(StrEnum):
    """Where a trajectory stands."""

    pending = "pending"
    generating = "generating"
    tool_calling = "tool_calling"
    completed = "completed"
    failed = "failed"


@dataclass(slots=True, kw_only=True, frozen=True)
class RolloutContext:
    """What all trajectories of one `collect` share.

    step: names the pass over the prompts (training step, evaluation); keys the seeds.
    temperature: of sampling, 0 is greedy. max_model_len: prompt plus response, tokens.
    """

    generator: Generator
    tools: ToolProvider
    codec: TextCodec
    policy: BranchPolicy
    config: RolloutConfig
    temperature: float
    max_model_len: int
    seed: int
    step: int | str


@dataclass(slots=True, kw_only=True, frozen=True)
class Origin:
    """What a fork starts from; a fault instead of a session: the tools could not be forked."""

    parent_id: str
    tape: Tape
    session: ToolSession | RuntimeError | OSError
    num_calls: int
    baseline: float


class TrajectoryRun:
    """Grows one trajectory; `run` once.

    prompt_key: the prompt's name, unique among the prompts of the call.
    slots: forks this path may make. on_fork: takes each new sibling and runs it.
    """

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        prompt_key: str,
        path: tuple[int, ...],
        *,
        slots: int,
        on_fork: Callable[[TrajectoryRun], None],
        origin: Origin | None = None,
    ) -> None:
        self.state = State.pending
        self.path = path
        self._context = context
        self._prompt = prompt
        self._prompt_key = prompt_key
        self._slots = slots
        self._on_fork = on_fork
        self._origin = origin
        self._tape = origin.tape if origin else Tape()
        self._fork_len = len(self._tape)
        self._session: ToolSession | None = None
        if origin and not isinstance(origin.session, FAULTS):
            self._session = origin.session
        self._num_calls = origin.num_calls if origin else 0
        self._baseline = origin.baseline if origin else None
        self._tool_rewards: dict[str, float] = {}
        self._num_children = 0
        self._num_parts = 0
        # A fork does not ask again about the answer it was forked at.
        self._may_probe = False
        config = context.config
        self._max_tokens = min(
            config.max_response_tokens, context.max_model_len - len(prompt.token_ids)
        )

    @property
    def trajectory_id(self) -> str:
        """Unique over the run."""
        return f"{self._prompt_key}/{self._context.step}/{'.'.join(map(str, self.path))}"

    async def run(self) -> Trajectory:
        """Live to the end; releases the tools however that end comes."""
        try:
            stop_reason = await self._live()
        finally:
            await self.release()
        return self._record(stop_reason)

    async def release(self) -> None:
        """Release the tools; safe to call twice."""
        if self._session is None:
            return
        try:
            await self._session.release()
        except FAULTS as error:
            _log.warning("%s: release of the tools failed: %s", self.trajectory_id, error)
        self._session = None

    async def _live(self) -> StopReason:
        try:
            stop_reason = await self._take_turns()
        except FAULTS as error:
            is_engine = self.state is State.generating
            stop_reason = StopReason.aborted if is_engine else StopReason.tool_failure
            _log.warning("%s: %s: %s", self.trajectory_id, stop_reason, error)
            if len(self._tape) > self._tape.open_from:
                self._close_turn()
            if isinstance(error, ToolFault):
                self._tape.add_tool((), "", error.outcome)
        failed = stop_reason in (StopReason.aborted, StopReason.tool_failure)
        self.state = State.failed if failed else State.completed
        return stop_reason

    async def _take_turns(self) -> StopReason:
        if self._origin is None:
            self._session = self._context.tools.open()
            await self._session.create(self._prompt.tools_kwargs)
        elif isinstance(self._origin.session, FAULTS):
            raise self._origin.session
        assert self._session is not None
        stop_reason: StopReason | None = None
        while stop_reason is None:
            stop_reason = await self._take_turn(self._session)
        if stop_reason not in (StopReason.aborted, StopReason.tool_failure):
            self.state = State.tool_calling
            self._tool_rewards = await self._session.calc_reward()
        return stop_reason

    async def _take_turn(self, session: ToolSession) -> StopReason | None:
        """Sample one turn and run the call it ends in; None: there is a next turn."""
        self.state = State.generating
        finish, text = await self._speak()
        match finish:
            case Finish.eos:
                return StopReason.eos
            case Finish.length:
                return StopReason.length
            case Finish.aborted:
                return StopReason.aborted
        call = self._context.tools.parse(text)
        if call is None:
            return StopReason.stop
        if self._num_calls >= self._context.config.max_calls:
            return StopReason.call_limit
        if self._tape.num_said >= self._context.config.max_turns:
            return StopReason.turn_limit
        self.state = State.tool_calling
        return await self._use_tool(session, call)

    async def _speak(self) -> tuple[Finish, str]:
        """One assistant turn: how it ended and its text."""
        start = len(self._tape)
        is_first = not self._tape.turns
        self._num_parts = 0
        if self._room < 1:
            return Finish.length, ""
        if self._may_probe and self._slots and self._baseline is not None:
            finish = await self._speak_probed(start, self._baseline)
        else:
            finish = await self._sample(self._room)
        text = self._close_turn()
        if is_first:
            self._baseline = self._context.policy.baseline(self._tape.entropies[start:])
        return finish, text

    async def _speak_probed(self, start: int, baseline: float) -> Finish:
        """Sample a probe, decide about forks, then sample the rest of the turn."""
        finish = await self._sample(min(self._context.policy.probe_tokens, self._room))
        if finish is not Finish.aborted:
            await self._fork(start, baseline)
        stops = self._context.tools.stop_strings
        while finish is Finish.length and self._room:
            text = self._context.codec.decode(self._tape.token_ids[start:])
            if not ends_inside(text, stops):
                return await self._sample(self._room)
            # The engine looks for a closing tag in one request's output only: a tag that the
            # probe cut in two is completed token by token.
            finish = await self._sample(1)
            text = self._context.codec.decode(self._tape.token_ids[start:])
            if finish is Finish.length and any(stop in text for stop in stops):
                return Finish.stop
        return finish

    async def _sample(self, max_tokens: int) -> Finish:
        """One engine request, appended to the open turn."""
        context, tape = self._context, self._tape
        turn, part = len(tape.turns), self._num_parts
        self._num_parts += 1
        greedy = context.temperature == 0
        request = GenerateRequest(
            request_id=f"{self.trajectory_id}/{turn}.{part}",
            token_ids=(*self._prompt.token_ids, *tape.token_ids),
            max_tokens=max_tokens,
            temperature=context.temperature,
            top_p=context.config.top_p,
            top_k=context.config.top_k,
            seed=None
            if greedy
            else request_seed(context.seed, context.step, self._prompt_key, self.path, turn, part),
            stop=context.tools.stop_strings,
        )
        try:
            generation = await context.generator.generate(request)
        except asyncio.CancelledError:
            with suppress(*FAULTS):
                async with asyncio.timeout(ABORT_DEADLINE_S):
                    await context.generator.abort(request.request_id)
            raise
        num_new = len(generation.token_ids)
        assert num_new <= max_tokens, f"{request.request_id}: {num_new} of {max_tokens} tokens"
        assert num_new or generation.finish is Finish.aborted, f"{request.request_id}: no token"
        tape.add_sampled(generation)
        return generation.finish

    async def _fork(self, start: int, baseline: float) -> None:
        """Ask the policy, and fork at token `start`, right behind the tool's answer."""
        point = ForkPoint(
            path=self.path,
            slots=self._slots,
            baseline=baseline,
            probe_entropies=self._tape.entropies[start:],
        )
        num_forks = min(self._context.policy.num_forks(point), self._slots)
        if num_forks < 1:
            return
        own_slots, *child_slots = split_evenly(self._slots - num_forks, num_forks + 1)
        self._slots = own_slots
        for slots in child_slots:
            origin = Origin(
                parent_id=self.trajectory_id,
                tape=self._tape.prefix(start),
                session=await self._fork_session(),
                num_calls=self._num_calls,
                baseline=baseline,
            )
            child = TrajectoryRun(
                self._context,
                self._prompt,
                self._prompt_key,
                (*self.path, self._num_children),
                slots=slots,
                on_fork=self._on_fork,
                origin=origin,
            )
            self._num_children += 1
            self._on_fork(child)

    async def _fork_session(self) -> ToolSession | RuntimeError | OSError:
        assert self._session is not None
        try:
            return await self._session.fork()
        except FAULTS as error:
            _log.warning("%s: fork of the tools failed: %s", self.trajectory_id, error)
            return error

    async def _use_tool(self, session: ToolSession, call: ToolCall) -> StopReason | None:
        """Run the call and append its answer."""
        self._num_calls += 1
        outcome = await session.execute(call.tool, call.arguments)
        if outcome.status is ToolStatus.infra_error:
            self._tape.add_tool((), "", outcome)
            return StopReason.tool_failure
        fitting = self._fit(outcome)
        if fitting is None:
            self._tape.add_tool((), "", outcome)
            return StopReason.length
        self._tape.add_tool(*fitting, outcome)
        self._may_probe = True
        return None

    def _fit(self, outcome: ToolOutcome) -> tuple[Sequence[int], str] | None:
        """The answer as ids and text, leaving room for at least one token; None: no way.

        An answer that is too long is cut to half of the room that is left.
        """
        tools, codec = self._context.tools, self._context.codec
        text = tools.render(outcome)
        token_ids = codec.encode(text)
        limit, num_chars = self._room - 1, len(outcome.answer)
        while len(token_ids) > limit:
            limit = self._room // 2
            num_chars = min(num_chars - 1, num_chars * limit // len(token_ids))
            if num_chars < 1:
                return None
            text = tools.render(replace(outcome, answer=outcome.answer[:num_chars] + CUT_NOTE))
            token_ids = codec.encode(text)
        return token_ids, text

    @property
    def _room(self) -> int:
        """Tokens the trajectory may still grow by."""
        return self._max_tokens - len(self._tape)

    def _close_turn(self) -> str:
        tape = self._tape
        return tape.close_turn(self._context.codec.decode(tape.token_ids[tape.open_from :])).text

    def _record(self, stop_reason: StopReason) -> Trajectory:
        tape, origin = self._tape, self._origin
        return Trajectory(
            trajectory_id=self.trajectory_id,
            prompt=self._prompt,
            path=self.path,
            token_ids=tape.token_ids,
            loss_mask=tape.loss_mask,
            logps=tape.logps,
            entropies=tape.entropies,
            versions=tape.versions,
            turn_ids=tape.turn_ids,
            turns=tape.turns,
            stop_reason=stop_reason,
            parent_id=origin.parent_id if origin else None,
            fork_len=self._fork_len,
            num_calls=self._num_calls,
            baseline_entropy=self._baseline,
            tool_rewards=self._tool_rewards,
        )


def ends_inside(text: str, stops: Sequence[str]) -> bool:
    """True where the text ends in the beginning of a stop string."""
    return any(text.endswith(stop[:size]) for stop in stops for size in range(1, len(stop)))
