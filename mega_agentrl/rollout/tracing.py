"""OpenTelemetry spans of trajectories.

    trajectory              a root's span starts a trace; a fork's is inside of its parent's span
      turn                  from the first request of a turn to the answers of its tools
        generate            one engine request, including its continuations with
                            `rollout.partial_rollout`
        wait                for a free tool (`wait.for=slot`), for copies of the tools (`fork`),
                            for the simulated user (`user`)
        tool                one call
      wait                  for the creation of the tools (`tools`) and for their rewards (`reward`)

A trajectory's span has the end time of the trajectory, but is exported only when its score is
known, which becomes an attribute; later contributions of a reward model are not recorded. Without
`RolloutSpans` all methods of `TrajectorySpans` do nothing but await what they are given.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from opentelemetry.trace import StatusCode, set_span_in_context

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from mega_agentrl.types.records import (
        GenerateRequest,
        Generation,
        Prompt,
        ToolOutcome,
        Trajectory,
    )

ResultT = TypeVar("ResultT")
Attributes = dict[str, str | int | float | bool]

_NS_PER_S = 1_000_000_000


class RolloutSpans:
    """The open trajectory spans of a run; the caller shuts down the tracer's provider."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._open_spans: dict[str, Span] = {}
        self._end_times_ns: dict[str, int] = {}

    def start_trajectory(self, name: str, attributes: Attributes, parent: str | None) -> Span:
        """Start the span of a trajectory, inside of the span of its parent if it is a fork."""
        parent_span = None if parent is None else self._open_spans.get(parent)
        context = None if parent_span is None else set_span_in_context(parent_span)
        span = self.tracer.start_span("trajectory", context=context, attributes=attributes)
        self._open_spans[name] = span
        return span

    def mark_ended(self, name: str) -> None:
        """Record now as the end time of a trajectory, unless one was recorded before."""
        self._end_times_ns.setdefault(name, time.time_ns())

    def record_score(self, trajectory: Trajectory) -> None:
        """Record the score, if there is one, and end the span, if one is open."""
        span = self._open_spans.get(trajectory.trajectory_id)
        if span is not None and trajectory.score is not None:
            span.set_attribute("reward", trajectory.score.value)
            span.set_attribute("success", trajectory.score.correct)
        self.end_span(trajectory.trajectory_id)

    def end_span(self, name: str) -> None:
        """End and export the span of a trajectory."""
        span, end_ns = self._open_spans.pop(name, None), self._end_times_ns.pop(name, None)
        if span is not None:
            span.end(end_time=end_ns)

    def close(self) -> None:
        """End the remaining spans, of trajectories that were never scored."""
        for name in list(self._open_spans):
            self.end_span(name)


class TrajectorySpans:
    """The spans of one trajectory; `start` starts them.

    Args:
        spans: The spans of the run; None disables tracing.
        step: Name of the pass.
        parent_id: Id of the trajectory it was forked from; None for a root.
    """

    def __init__(
        self,
        spans: RolloutSpans | None,
        prompt: Prompt,
        trajectory_id: str,
        step: int | str,
        parent_id: str | None = None,
    ) -> None:
        self._spans = spans
        self._trajectory_id = trajectory_id
        self._parent_id = parent_id
        self._prompt = prompt
        self._step = step
        self._span: Span | None = None
        self._turn_span: Span | None = None
        self._num_turns = 0

    def start(self) -> None:
        """Start the span of the trajectory."""
        if self._spans is None:
            return
        attributes: Attributes = {
            "trajectory.id": self._trajectory_id,
            "prompt.id": self._prompt.prompt_id,
            "data_source": self._prompt.data_source,
            "step": str(self._step),
        }
        if self._parent_id is not None:
            attributes["trajectory.parent"] = self._parent_id
        self._span = self._spans.start_trajectory(self._trajectory_id, attributes, self._parent_id)

    def start_turn(self) -> None:
        """Start the span of a turn and end that of the turn before."""
        if self._spans is None or self._span is None:
            return
        self.end_turn()
        self._turn_span = self._spans.tracer.start_span(
            "turn",
            context=set_span_in_context(self._span),
            attributes={"turn.index": self._num_turns},
        )
        self._num_turns += 1

    async def trace_generate(
        self, request: GenerateRequest, work: Awaitable[Generation]
    ) -> Generation:
        """Await an engine request inside of a span."""
        if self._span is None:
            return await work
        start_ns = time.time_ns()
        attributes: Attributes = {"gen_ai.usage.input_tokens": len(request.token_ids)}
        try:
            generation = await work
        except BaseException as error:
            self._add_span("generate", start_ns, attributes, error)
            raise
        attributes |= {
            "gen_ai.usage.output_tokens": len(generation.token_ids),
            "finish": str(generation.finish_reason),
            "version": generation.version,
        }
        self._add_span("generate", start_ns, attributes)
        return generation

    async def trace_tool_call(self, name: str, work: Awaitable[ToolOutcome]) -> ToolOutcome:
        """Await a tool call inside a span; the wait for a free slot becomes a span of its own."""
        if self._span is None:
            return await work
        start_ns = time.time_ns()
        attributes: Attributes = {"gen_ai.tool.name": name}
        try:
            outcome = await work
        except BaseException as error:
            self._add_span("tool", start_ns, attributes, error)
            raise
        if outcome.queue_s > 0:
            run_ns = min(time.time_ns(), start_ns + int(outcome.queue_s * _NS_PER_S))
            self._add_span("wait", start_ns, {"wait.for": "slot", **attributes}, end_ns=run_ns)
            start_ns = run_ns
        self._add_span("tool", start_ns, {**attributes, "tool.status": str(outcome.status)})
        return outcome

    async def trace_wait(self, what: str, work: Awaitable[ResultT]) -> ResultT:
        """Await `work` inside of a wait span; `what` says what the trajectory waits for."""
        if self._span is None:
            return await work
        start_ns = time.time_ns()
        try:
            result = await work
        except BaseException as error:
            self._add_span("wait", start_ns, {"wait.for": what}, error)
            raise
        self._add_span("wait", start_ns, {"wait.for": what})
        return result

    def end_turn(self) -> None:
        """End the span of the last turn, if one is open."""
        if self._turn_span is not None:
            self._turn_span.end()
            self._turn_span = None

    def mark_ended(self) -> None:
        """Record the end time of the trajectory; `record_outcome` follows."""
        if self._spans is not None and self._span is not None:
            self.end_turn()
            self._spans.mark_ended(self._trajectory_id)

    def record_outcome(self, trajectory: Trajectory) -> None:
        """Record the outcome of the ended trajectory as attributes of its span."""
        if self._spans is None or self._span is None:
            return
        self.mark_ended()
        self._span.set_attributes(
            {
                "outcome": str(trajectory.stop_reason),
                "tokens": len(trajectory.token_ids),
                "tokens.sampled": sum(trajectory.loss_mask),
                "tool_calls": trajectory.num_tool_calls,
            }
        )
        if trajectory.failed:
            self._span.set_status(StatusCode.ERROR, str(trajectory.stop_reason))

    def mark_cancelled(self) -> None:
        """Mark the trajectory as cancelled, by the caller or by a bug, and end its span."""
        if self._spans is None or self._span is None:
            return
        self.end_turn()
        self._span.set_status(StatusCode.ERROR, "cancelled")
        self._spans.end_span(self._trajectory_id)

    def _add_span(
        self,
        kind: str,
        start_ns: int,
        attributes: Mapping[str, str | int | float | bool],
        error: BaseException | None = None,
        end_ns: int | None = None,
    ) -> None:
        """Add a completed span inside of the turn or, between turns, of the trajectory."""
        assert self._spans is not None and self._span is not None
        parent_context: Context = set_span_in_context(self._turn_span or self._span)
        span = self._spans.tracer.start_span(
            kind, context=parent_context, attributes=attributes, start_time=start_ns
        )
        if error is not None:
            span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        span.end(end_time=end_ns)
