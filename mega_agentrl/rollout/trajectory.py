"""One trajectory as one asyncio task: a state machine from PENDING to COMPLETED or FAILED.

Consumes a prompt (or the prefix of the trajectory it forks from), produces a `Trajectory`.
Waits for the engine (GENERATING, see `speech`), its tools (TOOL_CALLING) and the simulated user
(INTERACTING), each behind a port with its own deadlines; unblocked by their answers, by the end
of its wall time or by cancellation, after which tools and user are released and the running
request is aborted.

A turn: sample until a closing tag, the end of the turn, or the token budget; run the calls it
makes (see `answers`); append their answers with loss mask 0. With tags the answer goes on the
assistant's turn, else it comes as chat messages and a new turn begins; a turn that lacks its
end-of-turn token then gets it, with loss mask 0. A message without a call goes to the simulated
user, where there is one. After tools' answers the branch policy may ask for a probe of k tokens
and then for forks right behind the answers; the probed tokens stay with this trajectory.

Budgets are the trajectory's own and exact: tool answers count, and one that does not fit is cut
with a note. `max_calls` counts calls, not turns, wrong ones included: of a turn with more calls
than are left the first ones are run, the others are answered by a refusal, and a turn that calls
when none is left is the last one. Nothing is run whose answer nobody could read.

A fault of engine, tools or user ends the trajectory as failed, one of tools or user with its
outcome as the last turn, without tokens; anything else that raises is a bug and passes through.
Scores nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import OnBadCall
from mega_agentrl.rollout.answers import CUT_NOTE, refused, run_calls
from mega_agentrl.rollout.context import FAULTS, Origin, RolloutContext, State
from mega_agentrl.rollout.dialogue import Dialogue
from mega_agentrl.rollout.forking import Forks, copy_of
from mega_agentrl.rollout.speech import ABORT_DEADLINE_S, Speech, ends_inside
from mega_agentrl.rollout.tape import Tape
from mega_agentrl.types.faults import RankLostError, ToolFault
from mega_agentrl.types.records import (
    Author,
    BadCall,
    Finish,
    StopReason,
    ToolStatus,
    Trajectory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mega_agentrl.rollout.branching import ForkBudget
    from mega_agentrl.types.ports import ToolSession, UserSession
    from mega_agentrl.types.records import Prompt, ToolCall

__all__ = [
    "ABORT_DEADLINE_S",
    "CUT_NOTE",
    "FAULTS",
    "RolloutContext",
    "State",
    "TrajectoryRun",
    "ends_inside",
]

_log = logging.getLogger(__name__)


class TrajectoryRun:
    """Grows one trajectory; `run` once.

    prompt_key: the prompt's name, unique among the prompts of the call.
    slots: pays for this path's forks. on_fork: takes each new sibling and runs it.
    """

    def __init__(
        self,
        context: RolloutContext,
        prompt: Prompt,
        prompt_key: str,
        path: tuple[int, ...],
        *,
        slots: ForkBudget,
        on_fork: Callable[[TrajectoryRun], None],
        origin: Origin | None = None,
    ) -> None:
        self.state = State.pending
        self.path = path
        self._context = context
        self._prompt = prompt
        self._prompt_key = prompt_key
        self._forks = Forks(context.policy, path, slots, origin.streak if origin else 0)
        self._on_fork = on_fork
        self._origin = origin
        self._tape = origin.tape if origin else Tape()
        self._fork_len = len(self._tape)
        restarts = origin.restarts if origin else ()
        parent_id = origin.parent_id if origin else None
        self._speech = Speech(context, prompt, prompt_key, path, self._tape, restarts, parent_id)
        self._spans = self._speech.spans
        self._dialogue = Dialogue(context, prompt, self._tape, self._speech)
        self._session: ToolSession | None = None
        if origin and not isinstance(origin.session, FAULTS):
            self._session = origin.session
        self._user: UserSession | None = None
        if origin and not isinstance(origin.user, FAULTS):
            self._user = origin.user
        self._until_s = origin.until_s if origin else None
        self._num_calls = origin.num_calls if origin else 0
        self._baseline = origin.baseline if origin else None
        self._tool_rewards: dict[str, float] = {}
        self._num_children = 0
        # A fork does not ask again about the answer it was forked at.
        self._may_probe = False

    @property
    def trajectory_id(self) -> str:
        """Unique over the run."""
        return self._speech.trajectory_id

    async def run(self) -> Trajectory:
        """Live to the end; releases tools and user however that end comes."""
        self._spans.begin()
        try:
            stop_reason = await self._live()
        except BaseException:
            self._spans.cut()
            raise
        finally:
            await self.release()
        self._spans.over()
        record = self._record(stop_reason)
        self._spans.end(record)
        return record

    async def release(self) -> None:
        """Release tools and user; safe to call twice."""
        for held in (self._session, self._user):
            if held is None:
                continue
            try:
                await held.release()
            except FAULTS as error:
                _log.warning("%s: release failed: %s", self.trajectory_id, error)
        self._session = self._user = None

    async def _live(self) -> StopReason:
        limit_s = self._context.config.max_wall_s
        if limit_s and self._until_s is None:
            self._until_s = asyncio.get_running_loop().time() + limit_s
        clock = asyncio.timeout_at(self._until_s)
        try:
            async with clock:
                stop_reason = await self._take_turns()
        except RankLostError:
            raise  # of the whole run, which goes back to its last checkpoint
        except FAULTS as error:
            is_engine = self.state is State.generating
            stop_reason = StopReason.aborted if is_engine else StopReason.tool_failure
            if clock.expired():
                stop_reason = StopReason.wall_time
            _log.warning("%s: %s: %s", self.trajectory_id, stop_reason, error)
            if len(self._tape) > self._tape.open_from:
                self._close_turn()
            if isinstance(error, ToolFault):
                is_user = self.state is State.interacting
                self._dialogue.note([error.outcome], Author.user if is_user else Author.tool)
        failed = stop_reason.is_failure
        self.state = State.failed if failed else State.completed
        return stop_reason

    async def _take_turns(self) -> StopReason:
        session = await self._create()
        stop_reason: StopReason | None = None
        while stop_reason is None:
            stop_reason = await self._take_turn(session)
        self._spans.end_turn()
        if not stop_reason.is_failure:
            self.state = State.tool_calling
            self._tool_rewards = await self._spans.wait("reward", session.calc_reward())
            if self._user is not None:
                self.state = State.interacting
                self._tool_rewards |= await self._user.calc_reward()
        return stop_reason

    async def _create(self) -> ToolSession:
        """Tools and user, made or inherited."""
        context, origin = self._context, self._origin
        if origin is not None:
            for held in (origin.session, origin.user):
                if isinstance(held, FAULTS):
                    raise held
            assert self._session is not None
            return self._session
        self._session = context.tools.open()
        await self._spans.wait("tools", self._session.create(self._prompt.tools_kwargs))
        user = context.interactions.open(self._prompt) if context.interactions else None
        if user is not None:
            await user.create()
            self._user = user
        return self._session

    async def _take_turn(self, session: ToolSession) -> StopReason | None:
        """Sample one turn and answer it; None: there is a next turn."""
        self.state = State.generating
        finish, text = await self._speak()
        match finish:
            case Finish.length:
                return StopReason.length
            case Finish.aborted:
                return StopReason.aborted
        tools = self._context.tools
        calls = tools.read(text) if tools.answers_in_chat or finish is Finish.stop else ()
        if calls:
            return await self._use_tools(session, calls, finish)
        if finish is Finish.stop:
            return StopReason.stop
        return StopReason.eos if self._user is None else await self._hear(self._user)

    async def _speak(self) -> tuple[Finish, str]:
        """One assistant turn: how it ended and its text."""
        start = len(self._tape)
        is_first = not self._tape.turns
        self._speech.begin_turn()
        if self._speech.room < 1:
            return Finish.length, ""
        if self._may_probe and self._forks.left and self._baseline is not None:
            finish = await self._speak_probed(start, self._baseline)
        else:
            finish = await self._speech.sample(self._speech.room)
        text = self._close_turn()
        if is_first:
            self._baseline = self._context.policy.baseline(self._tape.entropies[start:])
        return finish, text

    async def _speak_probed(self, start: int, baseline: float) -> Finish:
        """Sample a probe, decide about forks, then sample the rest of the turn."""
        probe_tokens = min(self._context.policy.probe_tokens, self._speech.room)
        finish = await self._speech.sample(probe_tokens)
        if finish is not Finish.aborted:
            await self._fork(start, baseline)
        return await self._speech.rest_of_turn(finish, start)

    async def _fork(self, start: int, baseline: float) -> None:
        """Ask the policy, and fork at token `start`, right behind the tool's answer."""
        assert self._session is not None
        for slots in self._forks.ask(start, baseline, self._tape.entropies[start:]):
            copies = copy_of(self._session, self._user, self.trajectory_id)
            session, user = await self._spans.wait("fork", copies)
            origin = Origin(
                parent_id=self.trajectory_id,
                tape=self._tape.prefix(start),
                session=session,
                num_calls=self._num_calls,
                baseline=baseline,
                streak=self._forks.streak,
                user=user,
                until_s=self._until_s,
                restarts=self._speech.restarts,
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

    async def _use_tools(
        self, session: ToolSession, calls: Sequence[ToolCall | BadCall], finish: Finish
    ) -> StopReason | None:
        """Run the calls of a turn and append their answers."""
        config, dialogue = self._context.config, self._dialogue
        if self._num_calls >= config.max_calls:
            return StopReason.call_limit
        if self._tape.num_said >= config.max_turns:
            return StopReason.turn_limit
        self.state = State.tool_calling
        stops = config.on_bad_call is OnBadCall.stop
        if stops and (bad := [call for call in calls if isinstance(call, BadCall)]):
            calls = bad[:1]
        fitting = calls[: config.max_calls - self._num_calls]
        self._num_calls += len(fitting)
        outcomes = await run_calls(session, fitting, self._spans)
        outcomes += [refused(call, config.max_calls) for call in calls[len(fitting) :]]
        failed = any(outcome.status is ToolStatus.infra_error for outcome in outcomes)
        if failed or (stops and any(outcome.bad_call for outcome in outcomes)):
            dialogue.note(outcomes)
            return StopReason.tool_failure if failed else StopReason.bad_call
        if not dialogue.answer(outcomes, ended=finish is Finish.eos):
            return StopReason.length
        self._may_probe = self._user is None or self._user.can_fork
        return None

    async def _hear(self, user: UserSession) -> StopReason | None:
        """Let the user judge and answer the message."""
        self.state = State.interacting
        outcome, is_last = await self._spans.wait("user", user.respond(self._dialogue.messages))
        stop_reason = None
        if is_last:
            stop_reason = StopReason.interaction_end
        elif not user.may_speak:
            stop_reason = StopReason.interaction_limit
        elif self._tape.num_said >= self._context.config.max_turns:
            stop_reason = StopReason.turn_limit
        if stop_reason is not None:
            self._dialogue.note([outcome], Author.user)
            return stop_reason
        if not self._dialogue.reply(outcome):
            return StopReason.length
        user.count_said()
        self._may_probe = False
        return None

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
            argmax_ids=tape.argmax_ids,
            stop_reason=stop_reason,
            parent_id=origin.parent_id if origin else None,
            fork_len=self._fork_len,
            num_calls=self._num_calls,
            baseline_entropy=self._baseline,
            tool_rewards=self._tool_rewards,
            decisions=self._forks.decisions,
            restarts=self._speech.restarts,
            template_drift="" if stop_reason.is_failure else self._dialogue.drift(),
            topk_gap=self._speech.topk_gap,
        )
