"""The simulated user of one trajectory, with deadlines, and which prompts have one.

Consumes the conversation so far, produces the user's answer. Waits for the interaction, at most
its deadline for every step; unblocked by its answer, by the deadline, or by cancellation. Whatever
it raises, and every step past the deadline, becomes a `ToolFault`: ours, never the policy's.
Whether an answer fits, and what it ends, is the trajectory's business.
"""

from __future__ import annotations

import math
import time
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from mega_agentrl.rollout.interaction import Interaction, Reply, load_interactions
from mega_agentrl.tool.deadline import DeadlinePassedError, within
from mega_agentrl.types.faults import ToolFault
from mega_agentrl.types.records import ToolOutcome, ToolStatus

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from mega_agentrl.types.records import Message, Prompt

ResultT = TypeVar("ResultT")


class InteractionKit:
    """`ports.Interactions`: those of the run by name."""

    def __init__(self, interactions: Sequence[Interaction]) -> None:
        self._by_name = {interaction.name: interaction for interaction in interactions}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the interactions."""
        return tuple(self._by_name)

    def open(self, prompt: Prompt) -> InteractionSession | None:
        """A session for a trajectory of the prompt, not yet created; None without one.

        Raises `ValueError` for a prompt that names none or another one.
        """
        kwargs = prompt.extra_info.get("interaction_kwargs")
        if kwargs is None or not self._by_name:
            return None
        default = next(iter(self._by_name)) if len(self._by_name) == 1 else None
        name = kwargs.get("name", default)
        if name not in self._by_name:
            raise ValueError(
                f"prompt {prompt.prompt_id}: interaction_kwargs.name is {name!r}, expected one "
                f"of {sorted(self._by_name)}; probable cause: the dataset was made for other "
                "interactions"
            )
        given = {key: value for key, value in kwargs.items() if key != "name"}
        return InteractionSession(self._by_name[name], given)

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise `ValueError` naming the first prompt whose `interaction_kwargs` cannot work."""
        for prompt in prompts:
            session = self.open(prompt)
            if session is None:
                continue
            try:
                session.check()
            except ValueError as error:
                raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error


def build_interactions(path: str, taken: Iterable[str]) -> InteractionKit:
    """The interactions of a yaml file, none where `path` is empty; `taken`: names of tools.

    Raises `ValueError` for whatever is wrong with the file and for a name that is taken.
    """
    kit = InteractionKit(load_interactions(path) if path else ())
    if both := sorted(set(kit.names) & set(taken)):
        raise ValueError(
            f"rollout.interaction_file={path}: there are tools called {', '.join(both)}, expected "
            "other names; rewards go by them"
        )
    return kit


class InteractionSession:
    """`ports.UserSession` over one interaction."""

    def __init__(self, interaction: Interaction, kwargs: Mapping[str, Any]) -> None:
        self.name = interaction.name
        self._num_said = 0
        self._interaction = interaction
        self._kwargs = kwargs
        self._state: Any = None
        self._is_open = False

    @property
    def may_speak(self) -> bool:
        """Whether it has messages left."""
        return self._num_said < self._interaction.max_turns

    @property
    def can_fork(self) -> bool:
        """Whether the trajectory may branch."""
        return self._interaction.can_fork(self._state)

    def check(self) -> None:
        """Raise `ValueError` for kwargs that cannot work."""
        self._interaction.check_kwargs(self._kwargs)

    async def create(self) -> None:
        """Make the state."""
        work = self._interaction.create(self._kwargs)
        self._state, _ = await self._step("create", work, self._interaction.release)
        self._is_open = True

    async def respond(self, messages: Sequence[Message]) -> tuple[ToolOutcome, bool]:
        """The answer as an outcome under the interaction's name, and whether it is the last."""
        work = self._interaction.respond(self._state, messages)
        reply, latency_s = await self._step("respond", work)
        if not isinstance(reply, Reply) or not isinstance(reply.text, str):
            raise self._fault("respond", f"got {type(reply).__name__}, expected a Reply of text")
        self._check_number("respond", reply.reward)
        outcome = ToolOutcome(
            tool=self.name,
            status=ToolStatus.ok,
            answer=reply.text,
            latency_s=latency_s,
            step_reward=float(reply.reward),
        )
        return outcome, reply.done

    def count_said(self) -> None:
        """Note that an answer was passed on."""
        self._num_said += 1

    async def fork(self) -> InteractionSession:
        """A session that diverges from here on; only where `can_fork`."""
        child = InteractionSession(self._interaction, self._kwargs)
        child._num_said = self._num_said
        if self._state is not None:
            work = self._interaction.fork(self._state)
            child._state, _ = await self._step("fork", work, self._interaction.release)
        child._is_open = True
        return child

    async def calc_reward(self) -> dict[str, float]:
        """Final reward by name; empty where there is none."""
        reward, _ = await self._step("calc_reward", self._interaction.calc_reward(self._state))
        if reward is None:
            return {}
        self._check_number("calc_reward", reward)
        return {self.name: float(reward)}

    async def release(self) -> None:
        """Free the state; a second call does nothing."""
        is_open, self._is_open = self._is_open, False
        if is_open:
            await self._step("release", self._interaction.release(self._state))

    async def _step(
        self,
        step: str,
        work: Coroutine[Any, Any, ResultT],
        undo: Callable[[ResultT], Awaitable[None]] | None = None,
    ) -> tuple[ResultT, float]:
        """What the step gives and how long it took, in seconds."""
        begin = time.monotonic()
        try:
            result = await within(work, self._interaction.deadline_s, undo=undo)
        except DeadlinePassedError as error:
            raise self._fault(step, str(error), time.monotonic() - begin) from error
        except Exception as error:  # the edge: its failure is data
            text = f"{type(error).__name__}: {error}"
            raise self._fault(step, text, time.monotonic() - begin) from error
        return result, time.monotonic() - begin

    def _check_number(self, step: str, value: object) -> None:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise self._fault(step, f"got the reward {value!r}, expected a finite number")

    def _fault(self, step: str, text: str, latency_s: float = 0.0) -> ToolFault:
        outcome = ToolOutcome(
            tool=self.name,
            status=ToolStatus.infra_error,
            answer=f"{step}: {text}",
            latency_s=latency_s,
        )
        return ToolFault(outcome)
