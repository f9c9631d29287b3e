"""One trajectory of ARPO's released rollout, advanced step by step by `lockstep_arpo`.

A segment is the output of one engine request. It ends the trajectory unless it ends in a call that
may still run, or reached the token limit of the round before the trajectory's own. As in the
released code, the call counter is incremented before the call is parsed, so an empty call counts
and ends the trajectory. A call beyond the limit is answered with an end-of-turn token that is
trained on as if it had been sampled (log-prob and entropy are recorded as 0). Empty answers and
failed tools are shown to the policy as "Tool(NAME) returned empty output." Unlike in the released
code, no tool call is repeated.

Cancellation aborts the running request; the caller then frees the tools with `release`. An engine
failure, or tools that cannot be created, forked or rewarded, fail the trajectory; for tools the
outcome is recorded as a last turn without tokens.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.context import INFRA_ERRORS
from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
from mega_agentrl.rollout.generation.turn_generator import TurnGenerator, request_failure
from mega_agentrl.rollout.images import check_answers
from mega_agentrl.types.errors import RankLostError, ToolSessionError
from mega_agentrl.types.records import (
    FinishReason,
    Generation,
    StopReason,
    ToolCall,
    ToolStatus,
    Trajectory,
)

if TYPE_CHECKING:
    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.types.protocols import TextCodec, ToolSession
    from mega_agentrl.types.records import BranchDecision, Prompt, ToolOutcome

NUM_TOP_LOGPS = 10
"""Number of top log-probs per token that the released code asks the engine for."""

FAILURE_STOP_REASONS = (StopReason.aborted, StopReason.tool_failure)

_log = logging.getLogger(__name__)


class LockstepTrajectory:
    """A trajectory that its caller advances, round by round.

    A round is `generate_segment`, then `run_tool` if `pending_call` is set. `stop_reason` is None
    while the trajectory is active.

    Args:
        prompt_key: Name of the prompt, unique in the pass.
        prompt_index: Index of the prompt in the batch.
        trajectory_index: Index in the order of creation, over all prompts of the batch.
        parent: The trajectory to fork from; None for a root.
    """

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        prompt_key: str,
        *,
        prompt_index: int,
        path: tuple[int, ...],
        trajectory_index: int,
        parent: LockstepTrajectory | None = None,
    ) -> None:
        self.prompt_index = prompt_index
        self.trajectory_index = trajectory_index
        self.path = path
        self.parent = parent
        self.stop_reason: StopReason | None = None
        self.pending_call: ToolCall | None = None
        self.segment: Generation | None = None
        self.decisions: list[BranchDecision] = []
        self.num_children = 0
        self.max_tokens = context.max_response_tokens(prompt)
        self._context = context
        self._prompt = prompt
        self.token_buffer: TokenBuffer = (
            parent.token_buffer.prefix(len(parent.token_buffer)) if parent else TokenBuffer()
        )
        self._fork_len = len(self.token_buffer)
        self.num_calls: int = parent.num_calls if parent else 0
        self._tool_session: ToolSession | None = None
        self._tool_rewards: dict[str, float] = {}
        self._turn_generator = TurnGenerator(
            context,
            prompt,
            prompt_key,
            path,
            self.token_buffer,
            parent_id=parent.trajectory_id if parent else None,
        )
        self._spans = self._turn_generator.spans

    @property
    def trajectory_id(self) -> str:
        """Unique id within the run."""
        return self._turn_generator.trajectory_id

    @property
    def is_active(self) -> bool:
        """Whether the trajectory has not ended."""
        return self.stop_reason is None

    async def open_session(self) -> None:
        """Create the tools, or fork those of the parent; must be awaited first."""
        self._spans.start()
        try:
            if self.parent is None:
                self._tool_session = self._context.tools.open_session()
                created = self._tool_session.create(self._prompt.tools_kwargs)
                await self._spans.trace_wait("tools", created)
                if self._prompt.images:
                    images = [placed.image for placed in self._prompt.images]
                    self._tool_session.show_images(images)
            else:
                assert self.parent._tool_session is not None
                self._tool_session = await self._spans.trace_wait(
                    "fork", self.parent._tool_session.fork()
                )
        except INFRA_ERRORS as error:
            self._fail(StopReason.tool_failure, error)

    async def generate_segment(self, max_tokens: int) -> None:
        """Sample a segment; sets `pending_call` if it ends in a call to run."""
        self.segment, self.pending_call = None, None
        if not self.is_active:
            return
        self._spans.start_turn()
        room = self._context.max_model_len - len(self._prompt.token_ids) - len(self.token_buffer)
        if room < 1:
            self._stop(StopReason.length)
            return
        try:
            generation = await self._turn_generator.generate(
                min(max_tokens, room), num_top_logps=NUM_TOP_LOGPS
            )
        except RankLostError:
            raise  # the whole run goes back to its last checkpoint
        except INFRA_ERRORS as error:
            self._fail(request_failure(error), error)
            return
        self.segment = generation
        self.token_buffer.append_sampled(generation)
        match generation.finish_reason:
            case FinishReason.eos:
                self._stop(StopReason.eos)
            case FinishReason.aborted:
                self._stop(StopReason.aborted)
            case FinishReason.length:
                self.stop_if_full()
            case FinishReason.stop:
                self._parse_call(generation.stop_string or "")

    async def run_tool(self) -> ToolOutcome:
        """Run `pending_call`, append its answer and return the outcome shown to the policy."""
        assert self.pending_call is not None and self._tool_session is not None
        work = self._tool_session.execute(self.pending_call.tool, self.pending_call.arguments)
        outcome = await self._spans.trace_tool_call(self.pending_call.tool, work)
        # Its answers are cut to length afterwards, which images do not permit.
        (outcome,) = await check_answers(None, [outcome])
        if outcome.status is ToolStatus.infra_error or not outcome.answer:
            outcome = replace(outcome, answer=f"Tool({outcome.tool}) returned empty output.")
        text = self._context.tools.render_outcome(outcome)
        self.token_buffer.append_observation(self._context.codec.encode(text), text, outcome)
        return outcome

    def stop_if_full(self) -> None:
        """End the trajectory if its token budget is used up."""
        if self.is_active and len(self.token_buffer) >= self.max_tokens:
            self._stop(StopReason.length)

    async def finalize(self) -> None:
        """Collect the tools' final rewards and free them; requires an ended trajectory."""
        self._spans.end_turn()
        if self._tool_session is not None and self.stop_reason not in FAILURE_STOP_REASONS:
            try:
                rewards = self._tool_session.calc_reward()
                self._tool_rewards = await self._spans.trace_wait("reward", rewards)
            except INFRA_ERRORS as error:
                self._fail(StopReason.tool_failure, error)
        await self.release()
        self._spans.mark_ended()

    async def release(self) -> None:
        """Free the tools; safe to call twice."""
        if self.is_active:
            self._spans.mark_cancelled()
        if self._tool_session is None:
            return
        try:
            await self._tool_session.release()
        except INFRA_ERRORS as error:
            _log.warning("%s: release of the tools failed: %s", self.trajectory_id, error)
        self._tool_session = None

    def to_trajectory(self, baseline: float | None) -> Trajectory:
        """Return the ended trajectory, truncated to its length, with the given baseline entropy."""
        assert self.stop_reason is not None
        buffer = truncate_buffer(self.token_buffer, self.max_tokens, self._context.codec)
        record = Trajectory(
            trajectory_id=self.trajectory_id,
            prompt=self._prompt,
            path=self.path,
            stop_reason=self.stop_reason,
            parent_id=self.parent.trajectory_id if self.parent else None,
            fork_len=self._fork_len,
            num_tool_calls=self.num_calls,
            baseline_entropy=baseline,
            tool_rewards=self._tool_rewards,
            decisions=self.decisions,
            **buffer.record_fields(),
        )
        self._spans.record_outcome(record)
        return record

    def _parse_call(self, stop_string: str) -> None:
        """Parse the call that ends the segment.

        As in the released code, it is the last call in the text of prompt and response.
        """
        context = self._context
        if self.num_calls >= context.config.max_tool_calls:
            self._append_forced_eos()
            self._stop(StopReason.call_limit)
            return
        if self.token_buffer.num_assistant_turns + 1 >= context.config.max_turns:
            self._stop(StopReason.turn_limit)
            return
        self.num_calls += 1
        text = context.codec.decode((*self._prompt.token_ids, *self.token_buffer.token_ids))
        end = text.rfind(stop_string) + len(stop_string)
        calls = context.tools.parse_calls(text[:end] if end >= len(stop_string) else text)
        if not calls or not isinstance(calls[-1], ToolCall):
            self._stop(StopReason.stop)
            return
        self._close_turn()
        self.pending_call = calls[-1]

    def _append_forced_eos(self) -> None:
        """Append an end-of-turn token that was not sampled, with loss mask 1."""
        assert self.segment is not None
        end = replace(
            self.segment,
            token_ids=(self._context.codec.eos_id,),
            logps=(0.0,),
            entropies=(0.0,),
            argmax_ids=(self._context.codec.eos_id,),
            top_logps=(),
            routes=None,
        )
        self.token_buffer.append_sampled(end)

    def _fail(self, reason: StopReason, error: BaseException) -> None:
        _log.warning("%s: %s: %s", self.trajectory_id, reason, error)
        self._stop(reason)
        if isinstance(error, ToolSessionError):
            self.token_buffer.append_observation((), "", error.outcome)

    def _stop(self, reason: StopReason) -> None:
        self.stop_reason = reason
        self._close_turn()

    def _close_turn(self) -> None:
        if len(self.token_buffer) > self.token_buffer.open_turn_start:
            ids = self.token_buffer.token_ids[self.token_buffer.open_turn_start :]
            self.token_buffer.close_turn(self._context.codec.decode(ids))


def truncate_buffer(buffer: TokenBuffer, length: int, codec: TextCodec) -> TokenBuffer:
    """Return the first `length` tokens; turns beyond that end are cut and may become empty."""
    truncated = buffer.prefix(length)
    for turn in buffer.turns[len(truncated.turns) :]:
        start, stop = min(turn.start, length), min(turn.stop, length)
        text = codec.decode(buffer.token_ids[start:stop])
        truncated.turns.append(replace(turn, start=start, stop=stop, text=text))
    return truncated
