"""One attempt of an agent as a trajectory, with forks by a second instance of the agent.

The agent runs once per trajectory and samples through a session of the gateway. When it ends, the
session's contexts become the response of the trajectory. An agent that raises, exits with an error
or returns something else than a reward is a failed trajectory, which is masked and counted. It is
scored like any other

* if the policy had used up its budget or the context, so that the agent could not go on,
* if the policy causes the error (`policy_errors`),
* if the agent runs in a sandbox with what the policy writes and fails after its first answer
  (`StopReason.agent_crash`), because the policy may have ended it there,
* if its time is over, unless engines, tools before they ran, or the agent before its first answer
  have taken it (`clock`).

An agent that always fails so has an error of its own. Such attempts count for
`rollout.max_failed_fraction`, which ends the run.

Where the branch policy asks after a tool's answer, the session samples a probe and may fork: a
second instance of the agent starts from the same prompt and is answered from the record until that
point (`gateway.record`). If its requests differ from the record, or it ends earlier, the fork is
given up: `run` returns None, and the tree starts another root.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from mega_agentrl.batch.tree_order import common_length
from mega_agentrl.rollout.agents.base import (
    AgentCommandError,
    AgentResultError,
    AgentTask,
    EnvironmentFailedError,
    PolicyError,
    prompt_messages,
    reward_parts,
)
from mega_agentrl.rollout.agents.command import CommandAgent
from mega_agentrl.rollout.agents.policy_errors import class_name
from mega_agentrl.rollout.branching.fork import ForkDecider
from mega_agentrl.rollout.clock import TrajectoryClock
from mega_agentrl.rollout.context import INFRA_ERRORS
from mega_agentrl.rollout.gateway.record import SessionRecord
from mega_agentrl.rollout.gateway.session import Probe, SessionScope
from mega_agentrl.rollout.gateway.tools import SessionTools
from mega_agentrl.rollout.tracing import TrajectorySpans
from mega_agentrl.tool.blocking_calls import call_in_thread
from mega_agentrl.types.records import (
    Role,
    StopReason,
    ToolOutcome,
    ToolStatus,
    Trajectory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.rollout.agents.base import AgentResult
    from mega_agentrl.rollout.branching.policy import ForkBudget
    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.rollout.gateway.capture import Block
    from mega_agentrl.rollout.gateway.session import AgentSession
    from mega_agentrl.rollout.gateway.tools import ToolsAtFork
    from mega_agentrl.types.records import Generation, Prompt

_CANCEL_TIMEOUT_S = 10.0
"""Time that an agent has to end after its cancellation."""
_MAX_ERROR_CHARS = 2000
"""Longer texts of an agent's error are cut."""

_POLICY_ENDS = (StopReason.policy_error, StopReason.agent_crash, StopReason.time_limit)
"""Ends of an agent that the policy has caused, or may have caused, with a reason in words."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class AgentFork:
    """The state of a trajectory at the point where a fork starts."""

    parent_id: str
    record: SessionRecord
    tools: ToolsAtFork
    baseline_entropy: float | None
    """Baseline entropy of the root, nats."""
    num_consecutive_forks: int
    """Number of most recent consecutive decisions on the path that forked."""


class AgentTrajectoryRunner:
    """Runs one attempt; call `run` once.

    Args:
        context: The shared context of the pass, with `agents`.
        prompt: The prompt.
        prompt_key: Name of the prompt, unique in the pass.
        path: Position in the tree.
        budget: Fork slots of this path.
        on_fork: Receives the runner of each fork and must start it.
        fork: State to start from; None for a root.
    """

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        prompt_key: str,
        path: tuple[int, ...],
        *,
        budget: ForkBudget,
        on_fork: Callable[[AgentTrajectoryRunner], None],
        fork: AgentFork | None = None,
    ) -> None:
        assert context.agents is not None, "rollout.agent is not set"
        self.path = path
        self._host = context.agents
        self._context = context
        self._prompt = prompt
        self._prompt_key = prompt_key
        self._on_fork = on_fork
        self._fork = fork
        self.replayed_spans: list[tuple[int, int]] = []
        """Response tokens of recorded answers, from the first to the end of each."""
        self._num_children = 0
        self._baseline = fork.baseline_entropy if fork else None
        self._fork_decider = ForkDecider(
            context.policy, path, budget, fork.num_consecutive_forks if fork else 0
        )
        parent_id = fork.parent_id if fork else None
        trajectory_id = context.trajectory_id(prompt_key, path)
        self._spans = TrajectorySpans(context.spans, prompt, trajectory_id, context.step, parent_id)
        limits = (context.config.trajectory_timeout_s, self._host.timeout_s)
        self._timeout_s = min(limit for limit in limits if limit)
        self._clock = TrajectoryClock(self._timeout_s, context.sampling_speed, is_agent=True)
        parent_tools = fork.tools if fork else None
        self._tools = SessionTools(context, prompt, self._spans, parent_tools, self._clock)
        self._scope = SessionScope(
            context=context,
            prompt=prompt,
            prompt_key=prompt_key,
            path=path,
            spans=self._spans,
            tools=self._tools,
            record=fork.record if fork else None,
            probe=Probe(num_tokens=self._num_probe_tokens, on_sampled=self._maybe_fork),
        )

    async def run(self) -> Trajectory | None:
        """Run the agent to its end; None if this is a fork that was given up."""
        self._spans.start()
        try:
            trajectory = await self._run_session()
        except BaseException:
            self._spans.mark_cancelled()
            raise
        finally:
            await self.release()
        if trajectory is None:
            self._spans.mark_cancelled()
            return None
        self._spans.mark_ended()
        self._spans.record_outcome(trajectory)
        return trajectory

    async def release(self) -> None:
        """Release the tools; safe to call twice."""
        try:
            await self._tools.release()
        except INFRA_ERRORS as error:
            _log.warning("%s: release failed: %s", self._scope.trajectory_id, error)

    async def release_turn_starts(self) -> None:
        """Do nothing: an agent that has ended cannot be continued."""

    async def _run_session(self) -> Trajectory | None:
        slots = self._host.slots
        await self._spans.trace_wait("agent_slot", slots.acquire())
        try:
            return await self._run_in_slot()
        finally:
            slots.release()

    async def _run_in_slot(self) -> Trajectory | None:
        key, session = self._host.gateway.open_session(self._scope)
        try:
            running = await self._run_agent(key, session)
        finally:
            await self._host.gateway.close_session(key)
            self._clock.stop()
        if session.fatal_error.done():
            raise session.fatal_error.result()
        if session.diverged.done():
            return None
        stop_reason, failure, rewards = self._read_result(session, running)
        record = self._scope.record
        if record is not None and not record.has_ended and not stop_reason.is_failure:
            return None
        return await self._build_trajectory(session, stop_reason, failure, rewards)

    def _read_result(
        self, session: AgentSession, running: asyncio.Future[AgentResult]
    ) -> tuple[StopReason, str, dict[str, float]]:
        """Return why the attempt ended, what failed, and the parts of its reward."""
        if not running.done():
            return self._read_timeout(session)
        error: BaseException | None = asyncio.CancelledError("the agent cancelled itself")
        if not running.cancelled():
            error = running.exception()
        rewards: dict[str, float] = {}
        if error is None:
            try:
                rewards = reward_parts(running.result())
            except AgentResultError as bad_result:
                error = bad_result
        if error is None and session.is_unused:
            error = AgentResultError("the agent ended without an answer of the policy")
        if error is not None:
            return self._read_error(session, error)
        return session.stop_reason, session.failure, rewards

    def _read_timeout(self, session: AgentSession) -> tuple[StopReason, str, dict[str, float]]:
        """Return why an attempt ended whose time was over, in words, and its reward."""
        clock = self._clock
        failure = (
            f"its time is over: the agent took {clock.policy_s:.1f} s with and after answers of "
            f"the policy, and the run {clock.run_s:.1f} s, expected at most {self._timeout_s:g} s"
        )
        is_policys = clock.is_policys and not self._has_engine_failed(session)
        return StopReason.time_limit if is_policys else StopReason.trajectory_timeout, failure, {}

    @staticmethod
    def _has_engine_failed(session: AgentSession) -> bool:
        """Return whether the agent got no answer, or not the one that it asked for last."""
        return session.is_unused or session.stop_reason.is_failure

    def _read_error(
        self, session: AgentSession, error: BaseException
    ) -> tuple[StopReason, str, dict[str, float]]:
        """Return why an attempt ended whose agent raised, what it raised, and its reward."""
        failure = _describe_error(error)
        if isinstance(error, EnvironmentFailedError):
            return StopReason.agent_failure, failure, {}
        if limit := session.limit_reached:
            return limit, failure, {}
        if self._has_engine_failed(session):
            return StopReason.agent_failure, failure, {}
        if not self._host.policy_errors.contains(error):
            agent = self._host.agent
            is_sandboxed = isinstance(agent, CommandAgent) and agent.is_sandboxed
            is_crash = is_sandboxed and isinstance(error, AgentCommandError | AgentResultError)
            return StopReason.agent_crash if is_crash else StopReason.agent_failure, failure, {}
        result = error.result if isinstance(error, PolicyError) else None
        try:
            return StopReason.policy_error, failure, reward_parts(result)
        except AgentResultError as bad_result:
            return StopReason.agent_failure, _describe_error(bad_result), {}

    async def _run_agent(self, key: str, session: AgentSession) -> asyncio.Future[AgentResult]:
        """Run the agent until it ends, its time is over, the run fails or the fork is given up.

        Returns:
            The agent's task, which is not done if it was ended.
        """
        running = asyncio.ensure_future(self._start_agent(key))
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock.start(lambda: over.set_result(None))
        try:
            ends: list[asyncio.Future[Any]] = [
                *(running, session.fatal_error, session.diverged, over)
            ]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._cancel_agent(running)
            raise
        if running not in done:
            await self._cancel_agent(running)
            return asyncio.get_running_loop().create_future()
        return running

    async def _start_agent(self, key: str) -> AgentResult:
        """Run the agent; an image of the prompt that is gone fails the attempt."""
        task = await call_in_thread(self._make_task, key)
        return await self._host.loop.run(partial(self._host.agent.run, task))

    def _make_task(self, key: str) -> AgentTask:
        prompt, gateway = self._prompt, self._host.gateway
        return AgentTask(
            prompt=prompt_messages(prompt),
            base_url=f"{gateway.url}/v1",
            api_key=key,
            socket_path=gateway.socket_path,
            attempt_id=self._scope.trajectory_id,
            attempt=self.path[0],
            data_source=prompt.data_source,
            ground_truth=copy.deepcopy(prompt.ground_truth),
            extra_info=copy.deepcopy(prompt.extra_info),
            tools_kwargs=copy.deepcopy(prompt.tools_kwargs),
        )

    async def _cancel_agent(self, running: asyncio.Future[AgentResult]) -> None:
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=_CANCEL_TIMEOUT_S)
        if not done:
            _log.warning(
                "%s: the agent did not end within %g s of its cancellation",
                self._scope.trajectory_id,
                _CANCEL_TIMEOUT_S,
            )

    async def _build_trajectory(
        self,
        session: AgentSession,
        stop_reason: StopReason,
        failure: str,
        rewards: dict[str, float],
    ) -> Trajectory:
        if not stop_reason.is_failure and self._tools.failure:
            failure, stop_reason = self._tools.failure, StopReason.tool_failure
        if not stop_reason.is_failure:
            try:
                rewards |= await self._tools.calc_reward()
            except INFRA_ERRORS as error:
                failure, stop_reason = str(error), StopReason.tool_failure
        response = session.build_response()
        self.replayed_spans = session.replayed_spans(response)
        if stop_reason.is_failure or stop_reason in _POLICY_ENDS:
            failure = failure or session.failure
            is_failure = stop_reason.is_failure
            is_expected = stop_reason is StopReason.policy_error
            level = logging.INFO if is_expected else logging.WARNING
            _log.log(level, "%s: %s: %s", self._scope.trajectory_id, stop_reason, failure)
            status = ToolStatus.infra_error if is_failure else ToolStatus.user_error
            outcome = ToolOutcome(tool="agent", status=status, answer=failure, latency_s=0.0)
            response.token_buffer.append_observation((), "", outcome)
        return Trajectory(
            trajectory_id=self._scope.trajectory_id,
            prompt=self._prompt,
            path=self.path,
            stop_reason=stop_reason,
            parent_id=self._fork.parent_id if self._fork else None,
            fork_len=session.num_replayed_tokens(response) if self._fork else 0,
            num_tool_calls=session.num_calls,
            baseline_entropy=self._baseline,
            tool_rewards=rewards,
            decisions=self._fork_decider.decisions,
            context_resets=response.context_resets,
            request_counts=_request_counts(session),
            **response.token_buffer.record_fields(),
        )

    def _num_probe_tokens(self, session: AgentSession, block: Block) -> int:
        """Return how many tokens to sample after a block before deciding about forks."""
        if self._baseline is None:
            self._baseline = self._first_turn_entropy(session)
        record = self._scope.record
        starts_here = record is not None and record.is_fork(block.digest)
        if self._baseline is None or starts_here or not block.messages:
            return 0
        role = Role.tool if block.messages[-1]["role"] == "tool" else Role.user
        return self._fork_decider.num_probe_tokens(session.tree.num_response_tokens, role)

    def _first_turn_entropy(self, session: AgentSession) -> float | None:
        """Return the baseline entropy, once the first answer of the session is known."""
        first = session.tree.first_answer
        if first is None or first.generation is None:
            return None
        return self._context.policy.baseline_entropy(first.generation.entropies)

    async def _maybe_fork(
        self, session: AgentSession, block: Block, generation: Generation
    ) -> None:
        """Ask the branch policy how many forks to start before this turn, and start them."""
        assert self._baseline is not None
        position = session.tree.num_response_tokens
        budgets = self._fork_decider.decide(position, self._baseline, generation.entropies)
        for budget in budgets:
            fork = AgentFork(
                parent_id=self._scope.trajectory_id,
                record=SessionRecord(session.tree, block, session.running_blocks),
                tools=await self._tools.copy_at_fork(),
                baseline_entropy=self._baseline,
                num_consecutive_forks=self._fork_decider.num_consecutive_forks,
            )
            child = AgentTrajectoryRunner(
                self._context,
                self._prompt,
                self._prompt_key,
                (*self.path, self._num_children),
                budget=budget,
                on_fork=self._on_fork,
                fork=fork,
            )
            self._num_children += 1
            self._on_fork(child)


def _request_counts(session: AgentSession) -> dict[str, int]:
    """Return `Trajectory.request_counts`."""
    ignored = {f"ignored/{name}": count for name, count in session.requests.num_ignored.items()}
    num_branches = session.tree.num_branches
    return {"requests": session.requests.num_requests, "branches": num_branches, **ignored}


def _describe_error(error: BaseException) -> str:
    """Return what ended an attempt, bounded: the policy may have written the text of the error."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  the class is the user's
        text = "(its text cannot be read)"
    text = text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}..."
    if isinstance(error, AgentCommandError | AgentResultError):
        return text
    return f"the agent raised {class_name(type(error))}: {text}"


def set_fork_lengths(
    trajectories: Sequence[Trajectory], runners: Sequence[AgentTrajectoryRunner]
) -> None:
    """Set what each fork shares with its parent, once both have ended.

    The parent may have continued an earlier branch of its contexts after the fork. Then the
    responses of both part earlier than where the fork was made, at a whole turn, and recorded
    answers stand behind it in both. The parent trains them, unless it has failed; the fork does not
    train them again.
    """
    by_id = {trajectory.trajectory_id: trajectory for trajectory in trajectories}
    spans = {runner.path: runner.replayed_spans for runner in runners}
    for trajectory in trajectories:
        if trajectory.parent_id is None:
            continue
        parent = by_id[trajectory.parent_id]
        shared = _shared_length(parent, trajectory)
        if shared < trajectory.fork_len:
            starts = [turn.start for turn in trajectory.turns if turn.start <= shared]
            trajectory.fork_len = max(starts, default=0)
        for start, stop in [] if parent.failed else spans[trajectory.path]:
            if start >= trajectory.fork_len:
                trajectory.loss_mask[start:stop] = [0] * (stop - start)


def _shared_length(parent: Trajectory, child: Trajectory) -> int:
    """Return with how many tokens both responses begin, in the same contexts."""
    shared = common_length(np.array(parent.token_ids), np.array(child.token_ids))
    resets = zip_longest(parent.context_resets, child.context_resets)
    for left, right in resets:
        if left != right:
            return min([shared, *(reset.start for reset in (left, right) if reset is not None)])
    return shared
