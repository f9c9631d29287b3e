"""One trajectory as one asyncio task: a state machine from `pending` to `completed` or `failed`.

The task waits for the engine (`generating`), the tools (`tool_calling`) and the simulated user
(`interacting`), which have their own deadlines. When it is cancelled or its time is over (`clock`),
it aborts the running request and releases tools and user.

A turn samples until a closing tag, the end of the turn or the token budget, runs the calls that
the turn makes, and appends their answers with loss mask 0. With the tag protocol an answer
continues the assistant's turn; otherwise it is a chat message and a new turn begins, and a turn
without an end-of-turn token gets one, with loss mask 0. A message without a call goes to the
simulated user if there is one. At the start of a turn, by default after tool answers, the branch
policy may ask for a probe of k tokens and fork at this position; the probed tokens stay with this
trajectory.

Budgets are exact. Tool answers count towards the token budget, and answers that do not fit are
truncated with a note. `rollout.max_tool_calls` counts calls including invalid ones: if a turn
makes more calls than are left, the first ones run and the others are answered with a refusal. If
none is left, the turn that calls is the last one. No call runs whose answer cannot be shown.

If the policy has used up `rollout.trajectory_timeout_s`, the trajectory ends as at another limit:
what it has sampled stays, and it is scored. If the run has used it up, the trajectory has failed.

Infrastructure errors of engine, tools or user end the trajectory as failed; for tools and user
the outcome is recorded as a last turn without tokens. Other exceptions are bugs and propagate.
Scoring is left to the caller.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import InvalidCallAction
from mega_agentrl.rollout.branching.fork import ForkDecider, fork_sessions
from mega_agentrl.rollout.clock import TrajectoryClock
from mega_agentrl.rollout.context import INFRA_ERRORS
from mega_agentrl.rollout.conversation.tool_calls import call_limit_outcome, run_tool_calls
from mega_agentrl.rollout.conversation.writer import ConversationWriter
from mega_agentrl.rollout.generation.token_buffer import TokenBuffer
from mega_agentrl.rollout.generation.turn_generator import TurnGenerator, request_failure
from mega_agentrl.rollout.images import check_answers
from mega_agentrl.types.errors import RankLostError, ToolSessionError
from mega_agentrl.types.records import (
    FinishReason,
    InvalidToolCall,
    Role,
    StopReason,
    ToolStatus,
    Trajectory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.rollout.branching.policy import ForkBudget
    from mega_agentrl.rollout.context import RolloutContext
    from mega_agentrl.types.protocols import InteractionSession, ToolSession
    from mega_agentrl.types.records import ContextReset, Prompt, ToolCall

_log = logging.getLogger(__name__)


class TrajectoryState(StrEnum):
    """The state of a trajectory."""

    pending = "pending"
    generating = "generating"
    tool_calling = "tool_calling"
    interacting = "interacting"
    completed = "completed"
    failed = "failed"


@dataclass(slots=True, kw_only=True, frozen=True)
class ForkSnapshot:
    """The state of a trajectory at the point where a fork starts."""

    parent_id: str
    token_buffer: TokenBuffer
    """Copy of the parent's tokens up to the fork."""
    tool_session: ToolSession | RuntimeError | OSError
    """Forked tools, or the error that forking them raised."""
    num_calls: int
    """Tool calls of the parent so far."""
    baseline_entropy: float | None
    """Baseline entropy of the root, nats; None if its first turn has none."""
    num_consecutive_forks: int
    """Number of most recent consecutive decisions on the path that forked."""
    user_session: InteractionSession | RuntimeError | OSError | None = None
    """Forked user, or the error that forking it raised; None without a user."""
    clock: TrajectoryClock | None = None
    """The parent's time so far, with which the fork goes on; None begins anew."""
    context_resets: tuple[ContextReset, ...] = ()


class TrajectoryRunner:
    """Samples one trajectory; call `run` once.

    Args:
        context: The shared context of the pass.
        prompt: The prompt.
        prompt_key: Name of the prompt, unique in the pass.
        path: Position in the tree.
        budget: Fork slots of this path.
        on_fork: Receives the runner of each fork and must start it.
        snapshot: State to start from; None for a root.
    """

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        prompt_key: str,
        path: tuple[int, ...],
        *,
        budget: ForkBudget,
        on_fork: Callable[[TrajectoryRunner], None],
        snapshot: ForkSnapshot | None = None,
    ) -> None:
        self.state = TrajectoryState.pending
        self.path = path
        self._context = context
        self._prompt = prompt
        self._prompt_key = prompt_key
        self._fork_decider = ForkDecider(
            context.policy, path, budget, snapshot.num_consecutive_forks if snapshot else 0
        )
        self._on_fork = on_fork
        self._fork_snapshot = snapshot
        self._token_buffer = snapshot.token_buffer if snapshot else TokenBuffer()
        self._fork_len = len(self._token_buffer)
        context_resets = snapshot.context_resets if snapshot else ()
        parent_id = snapshot.parent_id if snapshot else None
        limit_s = context.config.trajectory_timeout_s
        clock = snapshot.clock if snapshot else None
        self._clock = clock or TrajectoryClock(limit_s, context.sampling_speed)
        self._turn_generator = TurnGenerator(
            *(context, prompt, prompt_key, path, self._token_buffer, context_resets, parent_id),
            clock=self._clock,
        )
        self._spans = self._turn_generator.spans
        self._conversation_writer = ConversationWriter(
            context, prompt, self._token_buffer, self._turn_generator
        )
        self._tool_session: ToolSession | None = None
        if snapshot and not isinstance(snapshot.tool_session, INFRA_ERRORS):
            self._tool_session = snapshot.tool_session
        self._user_session: InteractionSession | None = None
        if snapshot and not isinstance(snapshot.user_session, INFRA_ERRORS):
            self._user_session = snapshot.user_session
        self._num_calls = snapshot.num_calls if snapshot else 0
        self._baseline_entropy = snapshot.baseline_entropy if snapshot else None
        self._tool_rewards: dict[str, float] = {}
        self._num_children = 0
        self._turn_starts: dict[int, ForkSnapshot] = {}

    @property
    def trajectory_id(self) -> str:
        """Unique id within the run."""
        return self._turn_generator.trajectory_id

    async def run(self) -> Trajectory:
        """Sample to the end; tools and user are released in any case."""
        self._spans.start()
        try:
            stop_reason = await self._run_to_end()
        except BaseException:
            self._spans.mark_cancelled()
            raise
        finally:
            await self.release()
        self._spans.mark_ended()
        record = self._build_trajectory(stop_reason)
        self._spans.record_outcome(record)
        return record

    async def release(self) -> None:
        """Release tools and user; safe to call twice."""
        await self._release_sessions(self._tool_session, self._user_session)
        self._tool_session = self._user_session = None

    async def release_turn_starts(self) -> None:
        """Release the copies of tools and user that were made for `fork_ended`."""
        while self._turn_starts:
            _, snapshot = self._turn_starts.popitem()
            await self._release_sessions(snapshot.tool_session, snapshot.user_session)

    async def fork_ended(self, position: int, budget: ForkBudget) -> None:
        """Start a path that branches off this ended one, at or after the start of a turn.

        Nothing starts if tools or user could not be copied at this turn.

        Args:
            position: Number of response tokens before the new path.
            budget: Fork slots of the new path.
        """
        start = max(turn.start for turn in self._token_buffer.turns if turn.start <= position)
        snapshot = self._turn_starts.get(start)
        if snapshot is None:
            return
        assert not isinstance(snapshot.tool_session, INFRA_ERRORS)
        assert not isinstance(snapshot.user_session, INFRA_ERRORS)
        session, user = await fork_sessions(
            snapshot.tool_session, snapshot.user_session, self.trajectory_id
        )
        copied = replace(
            snapshot,
            token_buffer=self._token_buffer.prefix(position),
            tool_session=session,
            user_session=user,
            clock=None,  # the saved one is that of the ended path
        )
        self._start_fork(copied, budget)

    async def _release_sessions(
        self, *sessions: ToolSession | InteractionSession | RuntimeError | OSError | None
    ) -> None:
        for session in sessions:
            if session is None or isinstance(session, INFRA_ERRORS):
                continue
            try:
                await session.release()
            except INFRA_ERRORS as error:
                _log.warning("%s: release failed: %s", self.trajectory_id, error)

    async def _run_to_end(self) -> StopReason:
        try:
            stop_reason = await self._run_in_time()
            if not stop_reason.is_failure:
                await self._calc_rewards()
        except RankLostError:
            raise  # the whole run goes back to its last checkpoint
        except INFRA_ERRORS as error:
            is_request = self.state is TrajectoryState.generating
            stop_reason = request_failure(error) if is_request else StopReason.tool_failure
            _log.warning("%s: %s: %s", self.trajectory_id, stop_reason, error)
            self._close_cut_turn()
            if isinstance(error, ToolSessionError):
                is_user = self.state is TrajectoryState.interacting
                self._conversation_writer.write_hidden_outcomes(
                    [error.outcome], Role.user if is_user else Role.tool
                )
        failed = stop_reason.is_failure
        self.state = TrajectoryState.failed if failed else TrajectoryState.completed
        return stop_reason

    async def _run_in_time(self) -> StopReason:
        """Run the turns until they or the time of the trajectory end."""
        clock, loop = self._clock, asyncio.get_running_loop()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                clock.start(lambda: scope.reschedule(loop.time()))
                return await self._run_turns()
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            clock.stop()
            self._spans.end_turn()
        self._close_cut_turn()
        by_policy = clock.is_policys
        level = logging.INFO if by_policy else logging.WARNING
        message = "%s: its time is over: %.1f s of the policy, %.1f s of the run"
        _log.log(level, message, self.trajectory_id, clock.policy_s, clock.run_s)
        return StopReason.time_limit if by_policy else StopReason.trajectory_timeout

    async def _run_turns(self) -> StopReason:
        session = await self._open_sessions()
        stop_reason: StopReason | None = None
        while stop_reason is None:
            stop_reason = await self._run_turn(session)
        return stop_reason

    async def _calc_rewards(self) -> None:
        """Ask tools and user for the rewards of a trajectory that has not failed."""
        assert self._tool_session is not None
        self.state = TrajectoryState.tool_calling
        calculation = self._tool_session.calc_reward()
        self._tool_rewards = await self._spans.trace_wait("reward", calculation)
        if self._user_session is not None:
            self.state = TrajectoryState.interacting
            self._tool_rewards |= await self._user_session.calc_reward()

    async def _open_sessions(self) -> ToolSession:
        """Create tools and user, or take over those of the fork snapshot."""
        context, snapshot = self._context, self._fork_snapshot
        if snapshot is not None:
            for session in (snapshot.tool_session, snapshot.user_session):
                if isinstance(session, INFRA_ERRORS):
                    raise session
            assert self._tool_session is not None
            self._tool_session.watch_waits(self._clock.note_waiting)
            return self._tool_session
        self._tool_session = context.tools.open_session()
        self._tool_session.watch_waits(self._clock.note_waiting)
        await self._spans.trace_wait("tools", self._tool_session.create(self._prompt.tools_kwargs))
        if self._prompt.images:
            assert context.images is not None, f"{self.trajectory_id}: images without a loader"
            await self._spans.trace_wait("images", context.images.load(self._prompt.images))
            self._tool_session.show_images([placed.image for placed in self._prompt.images])
        user = context.interactions.open_session(self._prompt) if context.interactions else None
        if user is not None:
            await user.create()
            self._user_session = user
        return self._tool_session

    async def _run_turn(self, session: ToolSession) -> StopReason | None:
        """Sample one turn and answer it; return None if the trajectory continues."""
        self.state = TrajectoryState.generating
        finish, text = await self._generate_turn()
        match finish:
            case FinishReason.length:
                return StopReason.length
            case FinishReason.aborted:
                return StopReason.aborted
        tools = self._context.tools
        calls: Sequence[ToolCall | InvalidToolCall] = ()
        if tools.uses_tool_messages:
            opening = self._conversation_writer.opened_reasoning(self._token_buffer.turns[-1].start)
            calls = tools.parse_calls(opening + text)
        elif finish is FinishReason.stop:
            calls = tools.parse_calls(text)
        if calls:
            return await self._run_tools(session, calls, finish)
        if finish is FinishReason.stop:
            return StopReason.stop
        return (
            StopReason.eos
            if self._user_session is None
            else await self._get_user_reply(self._user_session)
        )

    async def _generate_turn(self) -> tuple[FinishReason, str]:
        """Sample one assistant turn, or the rest of it; return how it ended and its text."""
        start = self._token_buffer.open_turn_start
        is_first = not self._token_buffer.turns
        self._spans.start_turn()
        if self._turn_generator.num_tokens_left < 1:
            return FinishReason.length, ""
        num_probe_tokens = self._num_probe_tokens(start)
        if self._context.policy.num_expansion_rounds:
            await self._save_turn_start(start)
        if num_probe_tokens:
            finish = await self._generate_turn_with_probe(start, num_probe_tokens)
        elif start < len(self._token_buffer):
            finish = await self._turn_generator.finish_turn(FinishReason.length, start)
        else:
            finish = await self._turn_generator.sample(self._turn_generator.num_tokens_left)
        text = self._close_turn()
        if is_first:
            self._baseline_entropy = self._context.policy.baseline_entropy(
                self._token_buffer.entropies[start:]
            )
        return finish, text

    def _num_probe_tokens(self, start: int) -> int:
        """Return how many tokens to probe in the turn at token `start`; 0 if it must not fork."""
        # The first turn of a root sets the baseline; a fork must not fork again where it starts.
        is_first_of_path = start <= self._fork_len
        if is_first_of_path or self._baseline_entropy is None:
            return 0
        if self._user_session is not None and not self._user_session.can_fork:
            return 0
        return self._fork_decider.num_probe_tokens(start, self._token_buffer.turns[-1].role)

    async def _generate_turn_with_probe(self, start: int, num_probe_tokens: int) -> FinishReason:
        """Sample the probe, decide about forks, then sample the rest of the turn."""
        num_tokens = min(num_probe_tokens, self._turn_generator.num_tokens_left)
        finish = await self._turn_generator.sample(num_tokens)
        if finish is not FinishReason.aborted:
            await self._maybe_fork(start)
        return await self._turn_generator.finish_turn(finish, start)

    async def _maybe_fork(self, start: int) -> None:
        """Ask the branch policy how many forks to start at token `start`, and start them."""
        baseline = self._baseline_entropy
        assert baseline is not None
        for budget in self._fork_decider.decide(
            start, baseline, self._token_buffer.entropies[start:]
        ):
            self._start_fork(await self._copy_state(start), budget)

    async def _save_turn_start(self, start: int) -> None:
        """Copy the state at the start of a turn for `fork_ended`."""
        if self._user_session is not None and not self._user_session.can_fork:
            return
        snapshot = await self._copy_state(start)
        sessions = (snapshot.tool_session, snapshot.user_session)
        if any(isinstance(session, INFRA_ERRORS) for session in sessions):
            await self._release_sessions(*sessions)
        else:
            self._turn_starts[start] = snapshot

    async def _copy_state(self, start: int) -> ForkSnapshot:
        """Return the state at token `start`; tools and user must be in their state there."""
        assert self._tool_session is not None
        copies = fork_sessions(self._tool_session, self._user_session, self.trajectory_id)
        session, user = await self._spans.trace_wait("fork", copies)
        return ForkSnapshot(
            parent_id=self.trajectory_id,
            token_buffer=self._token_buffer.prefix(start),
            tool_session=session,
            num_calls=self._num_calls,
            baseline_entropy=self._baseline_entropy,
            num_consecutive_forks=self._fork_decider.num_consecutive_forks,
            user_session=user,
            clock=self._clock.fork(),
            context_resets=self._turn_generator.context_resets,
        )

    def _start_fork(self, snapshot: ForkSnapshot, budget: ForkBudget) -> None:
        """Hand a child that starts from `snapshot` to `on_fork`."""
        child = TrajectoryRunner(
            self._context,
            self._prompt,
            self._prompt_key,
            (*self.path, self._num_children),
            budget=budget,
            on_fork=self._on_fork,
            snapshot=snapshot,
        )
        self._num_children += 1
        self._on_fork(child)

    async def _run_tools(
        self,
        session: ToolSession,
        calls: Sequence[ToolCall | InvalidToolCall],
        finish: FinishReason,
    ) -> StopReason | None:
        """Run the calls of a turn and append their answers."""
        config, writer = self._context.config, self._conversation_writer
        if self._num_calls >= config.max_tool_calls:
            return StopReason.call_limit
        if self._token_buffer.num_assistant_turns >= config.max_turns:
            return StopReason.turn_limit
        self.state = TrajectoryState.tool_calling
        stops_on_invalid = config.on_invalid_call is InvalidCallAction.stop
        invalid = [call for call in calls if isinstance(call, InvalidToolCall)]
        if stops_on_invalid and invalid:
            calls = invalid[:1]
        permitted = calls[: config.max_tool_calls - self._num_calls]
        self._num_calls += len(permitted)
        with self._clock.policys_turn():
            outcomes = await run_tool_calls(session, permitted, self._spans)
        shown = self._token_buffer.images
        outcomes = await check_answers(self._context.images, outcomes, shown)
        outcomes += [
            call_limit_outcome(call, config.max_tool_calls) for call in calls[len(permitted) :]
        ]
        failed = any(outcome.status is ToolStatus.infra_error for outcome in outcomes)
        if failed or (stops_on_invalid and any(outcome.is_invalid_call for outcome in outcomes)):
            writer.write_hidden_outcomes(outcomes)
            return StopReason.tool_failure if failed else StopReason.invalid_call
        if not writer.write_tool_answers(outcomes, ended=finish is FinishReason.eos):
            return StopReason.length
        if new := self._token_buffer.images[len(shown) :]:
            session.show_images([placed.image for placed in new])
        return None

    async def _get_user_reply(self, user: InteractionSession) -> StopReason | None:
        """Pass the message to the user and append the user's answer."""
        self.state = TrajectoryState.interacting
        outcome, is_last = await self._spans.trace_wait(
            "user", user.respond(self._conversation_writer.messages)
        )
        stop_reason = None
        if is_last:
            stop_reason = StopReason.interaction_end
        elif not user.can_respond:
            stop_reason = StopReason.interaction_limit
        elif self._token_buffer.num_assistant_turns >= self._context.config.max_turns:
            stop_reason = StopReason.turn_limit
        if stop_reason is not None:
            self._conversation_writer.write_hidden_outcomes([outcome], Role.user)
            return stop_reason
        if not self._conversation_writer.write_user_message(outcome):
            return StopReason.length
        user.record_response()
        return None

    def _close_cut_turn(self) -> None:
        if len(self._token_buffer) > self._token_buffer.open_turn_start:
            self._close_turn()

    def _close_turn(self) -> str:
        buffer = self._token_buffer
        return buffer.close_turn(
            self._context.codec.decode(buffer.token_ids[buffer.open_turn_start :])
        ).text

    def _build_trajectory(self, stop_reason: StopReason) -> Trajectory:
        snapshot = self._fork_snapshot
        return Trajectory(
            trajectory_id=self.trajectory_id,
            prompt=self._prompt,
            path=self.path,
            stop_reason=stop_reason,
            parent_id=snapshot.parent_id if snapshot else None,
            fork_len=self._fork_len,
            num_tool_calls=self._num_calls,
            baseline_entropy=self._baseline_entropy,
            tool_rewards=self._tool_rewards,
            decisions=self._fork_decider.decisions,
            context_resets=self._turn_generator.context_resets,
            template_drift=""
            if stop_reason.is_failure
            else self._conversation_writer.check_template_drift(),
            topk_entropy_error=self._turn_generator.topk_entropy_error,
            **self._token_buffer.record_fields(),
        )
