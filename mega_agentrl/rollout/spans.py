"""OpenTelemetry spans of trajectories: where each one's time went.

    trajectory              a root's is the beginning of a trace; a fork's is inside of its parent's
      turn                  from the first request of a turn to the answers of its tools
        generate            one engine request, with its rest where `rollout.carry_over` held it
        wait                for a free tool (`wait.for=slot`), for copies of the tools (`fork`),
                            for the simulated user (`user`)
        tool                one call
      wait                  for the tools to be made (`tools`) and to give rewards (`reward`)

A trajectory's span ends when it ends, and is handed on once its score is there, which is an
attribute of it; what a reward model adds later is not. Where a run has no spans
nothing is made, and what is awaited is handed through.
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

_NS = 1_000_000_000


class RolloutSpans:
    """The spans of a run. tracer: an SDK's, with a provider that somebody else shuts down."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._open: dict[str, Span] = {}
        self._ended_ns: dict[str, int] = {}

    def begin(self, name: str, attributes: Attributes, parent: str | None) -> Span:
        """The span of the trajectory `name`, inside of that of its parent where it is a fork."""
        above = None if parent is None else self._open.get(parent)
        context = None if above is None else set_span_in_context(above)
        span = self.tracer.start_span("trajectory", context=context, attributes=attributes)
        self._open[name] = span
        return span

    def ended(self, name: str) -> None:
        """The trajectory is over now, or was already; its score may be missing."""
        self._ended_ns.setdefault(name, time.time_ns())

    def scored(self, trajectory: Trajectory) -> None:
        """Its score is there, or will never be; safe for one without a span, and twice."""
        span = self._open.get(trajectory.trajectory_id)
        if span is not None and trajectory.score is not None:
            span.set_attribute("reward", trajectory.score.value)
            span.set_attribute("success", trajectory.score.correct)
        self.finish(trajectory.trajectory_id)

    def finish(self, name: str) -> None:
        """Hand a span on as it is."""
        span, end_ns = self._open.pop(name, None), self._ended_ns.pop(name, None)
        if span is not None:
            span.end(end_time=end_ns)

    def close(self) -> None:
        """Hand on what is left: trajectories whose scores nobody asked for."""
        for name in list(self._open):
            self.finish(name)


class PathSpans:
    """Those of one trajectory, which `begin` starts. spans: None for none."""

    def __init__(
        self,
        spans: RolloutSpans | None,
        prompt: Prompt,
        trajectory_id: str,
        step: int | str,
        parent_id: str | None = None,
    ) -> None:
        self._spans = spans
        self._name = trajectory_id
        self._parent_id = parent_id
        self._prompt = prompt
        self._step = step
        self._span: Span | None = None
        self._turn: Span | None = None
        self._num_turns = 0

    def begin(self) -> None:
        """The trajectory begins."""
        if self._spans is None:
            return
        about: Attributes = {
            "trajectory.id": self._name,
            "prompt.id": self._prompt.prompt_id,
            "data_source": self._prompt.data_source,
            "step": str(self._step),
        }
        if self._parent_id is not None:
            about["trajectory.parent"] = self._parent_id
        self._span = self._spans.begin(self._name, about, self._parent_id)

    def begin_turn(self) -> None:
        """A turn begins, and the one before it is over."""
        if self._spans is None or self._span is None:
            return
        self.end_turn()
        self._turn = self._spans.tracer.start_span(
            "turn",
            context=set_span_in_context(self._span),
            attributes={"turn.index": self._num_turns},
        )
        self._num_turns += 1

    async def generate(self, request: GenerateRequest, work: Awaitable[Generation]) -> Generation:
        """The answer to an engine request that `work` gives."""
        if self._span is None:
            return await work
        start_ns = time.time_ns()
        about: Attributes = {"gen_ai.usage.input_tokens": len(request.token_ids)}
        try:
            generation = await work
        except BaseException as error:
            self._note("generate", start_ns, about, error)
            raise
        about |= {
            "gen_ai.usage.output_tokens": len(generation.token_ids),
            "finish": str(generation.finish),
            "version": generation.version,
        }
        self._note("generate", start_ns, about)
        return generation

    async def tool(self, name: str, work: Awaitable[ToolOutcome]) -> ToolOutcome:
        """The outcome of a call that `work` gives."""
        if self._span is None:
            return await work
        start_ns = time.time_ns()
        about: Attributes = {"gen_ai.tool.name": name}
        try:
            outcome = await work
        except BaseException as error:
            self._note("tool", start_ns, about, error)
            raise
        if outcome.queue_s > 0:
            begun_ns = min(time.time_ns(), start_ns + int(outcome.queue_s * _NS))
            self._note("wait", start_ns, {"wait.for": "slot", **about}, end_ns=begun_ns)
            start_ns = begun_ns
        self._note("tool", start_ns, {**about, "tool.status": str(outcome.status)})
        return outcome

    async def wait(self, what: str, work: Awaitable[ResultT]) -> ResultT:
        """What `work` gives, while the trajectory waits for it."""
        if self._span is None:
            return await work
        start_ns = time.time_ns()
        try:
            result = await work
        except BaseException as error:
            self._note("wait", start_ns, {"wait.for": what}, error)
            raise
        self._note("wait", start_ns, {"wait.for": what})
        return result

    def end_turn(self) -> None:
        """The last turn is over; does nothing where none is open."""
        if self._turn is not None:
            self._turn.end()
            self._turn = None

    def over(self) -> None:
        """The trajectory is over now; `end` follows."""
        if self._spans is not None and self._span is not None:
            self.end_turn()
            self._spans.ended(self._name)

    def end(self, trajectory: Trajectory) -> None:
        """The trajectory is over, as this record of it says."""
        if self._spans is None or self._span is None:
            return
        self.over()
        self._span.set_attributes(
            {
                "outcome": str(trajectory.stop_reason),
                "tokens": len(trajectory.token_ids),
                "tokens.sampled": sum(trajectory.loss_mask),
                "tool_calls": trajectory.num_calls,
            }
        )
        if trajectory.failed:
            self._span.set_status(StatusCode.ERROR, str(trajectory.stop_reason))

    def cut(self) -> None:
        """The trajectory was cancelled, or a bug ended it; safe where it has not begun."""
        if self._spans is None or self._span is None:
            return
        self.end_turn()
        self._span.set_status(StatusCode.ERROR, "cancelled")
        self._spans.finish(self._name)

    def _note(
        self,
        kind: str,
        start_ns: int,
        attributes: Mapping[str, str | int | float | bool],
        error: BaseException | None = None,
        end_ns: int | None = None,
    ) -> None:
        """A span that is over, inside of the turn or, between turns, of the trajectory."""
        assert self._spans is not None and self._span is not None
        above: Context = set_span_in_context(self._turn or self._span)
        span = self._spans.tracer.start_span(
            kind, context=above, attributes=attributes, start_time=start_ns
        )
        if error is not None:
            span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        span.end(end_time=end_ns)
