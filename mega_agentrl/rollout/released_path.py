"""One trajectory of the released code's rounds: it takes the steps that `released` tells it to.

A segment is what one engine request sampled. It ends the trajectory unless it ends in a call
that may still run, or was cut short of the trajectory's length. As published: the call counter
goes up before the call is read, so an empty call counts and ends the trajectory; a call too
many is answered with an end-of-turn token that is trained on as if it had been sampled (its
log-prob and entropy are recorded as 0); an empty answer, and a tool that failed, read
"Tool(NAME) returned empty output." to the policy, which goes on. Nothing is run twice here.

Waits for the engine and its tools; unblocked by their answers, their deadlines, or cancellation,
which aborts the running request; then `release` frees the tools. An engine that fails, or tools
that cannot be made, forked or rewarded, fail the trajectory; the latter with their outcome as
the last turn, without tokens.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.context import FAULTS
from mega_agentrl.rollout.seeds import request_seed
from mega_agentrl.rollout.spans import PathSpans
from mega_agentrl.rollout.speech import ask, make_request
from mega_agentrl.rollout.tape import Tape
from mega_agentrl.types.faults import RankLostError, ToolFault
from mega_agentrl.types.records import (
    Finish,
    Generation,
    StopReason,
    ToolCall,
    ToolStatus,
    Trajectory,
)

if TYPE_CHECKING:
    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.types.ports import TextCodec, ToolSession
    from mega_agentrl.types.records import Decision, Prompt, ToolOutcome

NUM_TOP_LOGPS = 10
"""Alternatives the released code asks the engine for, per token."""

FAILURES = (StopReason.aborted, StopReason.tool_failure)

_log = logging.getLogger(__name__)


class ReleasedPath:
    """A trajectory that others move: `speak`, then `use_tool` where `call` is set, and again.

    sample: index of its prompt in the batch. number: its place in the order of creation, over
    all prompts.
    stop_reason: None while it is active.
    """

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        prompt_key: str,
        *,
        sample: int,
        path: tuple[int, ...],
        number: int,
        parent: ReleasedPath | None = None,
    ) -> None:
        self.sample = sample
        self.number = number
        self.path = path
        self.parent = parent
        self.stop_reason: StopReason | None = None
        self.call: ToolCall | None = None
        self.segment: Generation | None = None
        self.decisions: list[Decision] = []
        self.num_children = 0
        self.limit = min(
            context.config.max_response_tokens, context.max_model_len - len(prompt.token_ids)
        )
        self._context = context
        self._prompt = prompt
        self._prompt_key = prompt_key
        self.tape: Tape = parent.tape.prefix(len(parent.tape)) if parent else Tape()
        self._fork_len = len(self.tape)
        self.num_calls: int = parent.num_calls if parent else 0
        self._session: ToolSession | None = None
        self._num_parts = 0
        self._tool_rewards: dict[str, float] = {}
        parent_id = parent.trajectory_id if parent else None
        self._spans = PathSpans(context.spans, prompt, self.trajectory_id, context.step, parent_id)

    @property
    def trajectory_id(self) -> str:
        """Unique over the run."""
        return f"{self._prompt_key}/{self._context.step}/{'.'.join(map(str, self.path))}"

    @property
    def active(self) -> bool:
        """Whether it goes on."""
        return self.stop_reason is None

    async def open(self) -> None:
        """Make its tools, or fork those of its parent; to be awaited before anything else."""
        self._spans.begin()
        try:
            if self.parent is None:
                self._session = self._context.tools.open()
                created = self._session.create(self._prompt.tools_kwargs)
                await self._spans.wait("tools", created)
            else:
                assert self.parent._session is not None
                self._session = await self._spans.wait("fork", self.parent._session.fork())
        except FAULTS as error:
            self._fail(StopReason.tool_failure, error)

    async def speak(self, max_tokens: int) -> None:
        """Sample a segment; `call` is set where it ends in a call that is to be run."""
        self.segment, self.call = None, None
        if not self.active:
            return
        self._spans.begin_turn()
        room = self._context.max_model_len - len(self._prompt.token_ids) - len(self.tape)
        if room < 1:
            self._end(StopReason.length)
            return
        try:
            generation = await self._generate(min(max_tokens, room))
        except RankLostError:
            raise  # of the whole run, which goes back to its last checkpoint
        except FAULTS as error:
            self._fail(StopReason.aborted, error)
            return
        self.segment = generation
        self.tape.add_sampled(generation)
        match generation.finish:
            case Finish.eos:
                self._end(StopReason.eos)
            case Finish.aborted:
                self._end(StopReason.aborted)
            case Finish.length:
                self.drop_if_full()
            case Finish.stop:
                self._hear(generation.stop_string or "")

    async def use_tool(self) -> ToolOutcome:
        """Run `call` and append its answer; the outcome as the policy sees it."""
        assert self.call is not None and self._session is not None
        work = self._session.execute(self.call.tool, self.call.arguments)
        outcome = await self._spans.tool(self.call.tool, work)
        if outcome.status is ToolStatus.infra_error or not outcome.answer:
            outcome = replace(outcome, answer=f"Tool({outcome.tool}) returned empty output.")
        text = self._context.tools.render(outcome)
        self.tape.add_tool(self._context.codec.encode(text), text, outcome)
        self._num_parts = 0
        return outcome

    def drop_if_full(self) -> None:
        """End it where no token fits any more."""
        if self.active and len(self.tape) >= self.limit:
            self._end(StopReason.length)

    async def finish(self) -> None:
        """Take its tools' rewards and free them; it has ended."""
        self._spans.end_turn()
        if self._session is not None and self.stop_reason not in FAILURES:
            try:
                rewards = self._session.calc_reward()
                self._tool_rewards = await self._spans.wait("reward", rewards)
            except FAULTS as error:
                self._fail(StopReason.tool_failure, error)
        await self.release()
        self._spans.over()

    async def release(self) -> None:
        """Free its tools; safe to call twice."""
        if self.active:
            self._spans.cut()
        if self._session is None:
            return
        try:
            await self._session.release()
        except FAULTS as error:
            _log.warning("%s: release of the tools failed: %s", self.trajectory_id, error)
        self._session = None

    def record(self, baseline: float | None) -> Trajectory:
        """The ended trajectory, cut to its length; baseline: as `released` reads it."""
        assert self.stop_reason is not None
        tape = cut(self.tape, self.limit, self._context.codec)
        record = Trajectory(
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
            argmax_ids=tape.argmax_ids,
            stop_reason=self.stop_reason,
            parent_id=self.parent.trajectory_id if self.parent else None,
            fork_len=self._fork_len,
            num_calls=self.num_calls,
            baseline_entropy=baseline,
            tool_rewards=self._tool_rewards,
            decisions=self.decisions,
        )
        self._spans.end(record)
        return record

    def _hear(self, stop_string: str) -> None:
        """Read the call that the segment ends in; the last one of the whole text, as published."""
        context = self._context
        if self.num_calls >= context.config.max_calls:
            self._force_end()
            self._end(StopReason.call_limit)
            return
        if self.tape.num_said + 1 >= context.config.max_turns:
            self._end(StopReason.turn_limit)
            return
        self.num_calls += 1
        text = context.codec.decode((*self._prompt.token_ids, *self.tape.token_ids))
        end = text.rfind(stop_string) + len(stop_string)
        calls = context.tools.read(text[:end] if end >= len(stop_string) else text)
        if not calls or not isinstance(calls[-1], ToolCall):
            self._end(StopReason.stop)
            return
        self._close_turn()
        self.call = calls[-1]

    def _force_end(self) -> None:
        """Append an end of turn that nobody sampled, mask 1."""
        assert self.segment is not None
        end = replace(
            self.segment,
            token_ids=(self._context.codec.eos_id,),
            logps=(0.0,),
            entropies=(0.0,),
            argmax_ids=(self._context.codec.eos_id,),
            top_logps=(),
        )
        self.tape.add_sampled(end)

    async def _generate(self, max_tokens: int) -> Generation:
        context, turn, part = self._context, len(self.tape.turns), self._num_parts
        self._num_parts += 1
        seed = request_seed(context.seed, context.step, self._prompt_key, self.path, turn, part)
        request = make_request(
            context,
            f"{self.trajectory_id}/{turn}.{part}",
            (*self._prompt.token_ids, *self.tape.token_ids),
            max_tokens=max_tokens,
            seed=seed,
            num_top_logps=NUM_TOP_LOGPS,
        )
        return await self._spans.generate(request, ask(context.generator, request))

    def _fail(self, reason: StopReason, error: BaseException) -> None:
        _log.warning("%s: %s: %s", self.trajectory_id, reason, error)
        self._end(reason)
        if isinstance(error, ToolFault):
            self.tape.add_tool((), "", error.outcome)

    def _end(self, reason: StopReason) -> None:
        self.stop_reason = reason
        self._close_turn()

    def _close_turn(self) -> None:
        if len(self.tape) > self.tape.open_from:
            ids = self.tape.token_ids[self.tape.open_from :]
            self.tape.close_turn(self._context.codec.decode(ids))


def cut(tape: Tape, length: int, codec: TextCodec) -> Tape:
    """The first `length` tokens; a turn over that end is cut, one behind it keeps no token."""
    short = tape.prefix(length)
    for turn in tape.turns[len(short.turns) :]:
        start, stop = min(turn.start, length), min(turn.stop, length)
        text = codec.decode(tape.token_ids[start:stop])
        short.turns.append(replace(turn, start=start, stop=stop, text=text))
    return short
