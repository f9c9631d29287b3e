"""What a run would lose by ending now is saved: every so often, at the end, and at a signal.

Between two steps the run is at a pause: policy, controllers, prompts and what the summary needs
belong together. A pause is noted right after each step, inside of the same shield against
signals, so that until the next update whatever happens the policy is that of the last pause. A
rollout that is under way at a signal is dropped: the prompts of the pause hold those it had
taken. What `kill -9` leaves is the last checkpoint (`run_state`), from which `resume` goes on, and
the trees that have finished since (`tree_store`), which need not be sampled again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.rollout.tree_store import TreeStore
from mega_agentrl.train import run_state
from mega_agentrl.train.controllers import Controllers
from mega_agentrl.train.evaluate import HeldOut
from mega_agentrl.train.phases import step_name
from mega_agentrl.train.run_folder import KEPT_TREES, START
from mega_agentrl.train.run_state import RunState
from mega_agentrl.train.stopping import Stopped
from mega_agentrl.train.supervised import Imitated, Keeping

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.session import Session
    from mega_agentrl.train.stopping import Stopper
    from mega_agentrl.types.parts import Parts


@dataclass(frozen=True, slots=True)
class _Pause:
    step: int
    controllers: Controllers | None
    sampler: Mapping[str, Any]
    version: int
    warm_start: Imitated | None = None

    def __str__(self) -> str:
        if self.warm_start is not None:
            return f"step {self.warm_start.step} of the warm start"
        return f"RL step {self.step}"


class Safekeeping:
    """Of one run; a context manager around all of it.

    state: what the run goes on from, None at its beginning. is_begun: the warm start is over.
    step, controllers, before: of the last pause; controllers are None before the first step,
    before is until it was evaluated. The evaluations within RL belong to the pauses they are made
    in: a run that goes on from a pause makes the one that it owes.
    trees: those that no checkpoint has yet.
    """

    def __init__(
        self,
        parts: Parts,
        config: TrainConfig,
        session: Session,
        stopper: Stopper,
        state: RunState | None,
    ) -> None:
        self.stopper = stopper
        self.before: HeldOut | None = None
        self.is_begun = False
        self._parts = parts
        self._config = config
        self._session = session
        self._pause: _Pause | None = None
        self._is_saved = True
        self._evaluated_step = 0
        self._is_policy_saved = False
        self.trees = TreeStore(session.run_dir / KEPT_TREES)
        if state is not None:
            self._take_up(state)
        if not self.is_begun:
            # Of a policy that is lost; the one that comes has the same version numbers.
            self.trees.forget()
        elif config.rollout.staleness:
            # What follows is sampled with other weights than in the life that was lost.
            self.trees.forget_newer(parts.generator.version)

    @property
    def step(self) -> int:
        """RL steps made."""
        return 0 if self._pause is None else self._pause.step

    @property
    def controllers(self) -> Controllers | None:
        """See the class."""
        return None if self._pause is None else self._pause.controllers

    def __enter__(self) -> Safekeeping:
        self.stopper.begin_guard()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Anything but `Stopped` may have come in the middle of an update.
        try:
            if isinstance(error, Stopped):
                self.stopper.heed()
                if not self._is_saved:
                    self._session.note(f"{error}: saving the run after {self._pause}")
                    self._save()
        finally:
            self.stopper.end_guard()

    def warm_start(self) -> Keeping:
        """What keeps the warm start safe."""
        done = None if self._pause is None else self._pause.warm_start
        return Keeping(done=done, shield=self.stopper.shielded, note=self._imitated)

    def _imitated(self, imitated: Imitated) -> None:
        self._note(0, None, imitated)
        self._is_saved = False

    def started(self) -> None:
        """The policy is ready for RL and served; after a warm start its checkpoint is written."""
        with self.stopper.shielded():
            self._note(0, None)
            self.is_begun = self._is_saved = True
            if self._parts.demonstrations is not None:
                run_state.save(
                    self._parts.policy, self._session.run_dir, self._state(), keep=1, name=START
                )

    def evaluated(self, before: HeldOut) -> HeldOut:
        """Note the held-out evaluation before RL; returns it."""
        # Without training there is nothing in the weights that would be worth a checkpoint.
        self.before, self._is_saved = before, self._config.validates_only
        return before

    @property
    def owes_evaluation(self) -> bool:
        """Whether an evaluation is due in this pause and not made yet."""
        every, step = self._config.evaluate.every, self.step
        return every > 0 and step > self._evaluated_step and step % every == 0

    def evaluated_within(self) -> None:
        """Note that the pause's evaluation is made; the session has what it said."""
        self._evaluated_step, self._is_saved = self.step, False

    def stepped(self, step: int, controllers: Controllers) -> None:
        """Note the pause after a step, and save it if it is time to; call it shielded."""
        self._note(step, controllers)
        self._is_saved = False
        every = self._config.save_every
        if step == self._config.total_steps or (every and step % every == 0):
            with self._session.clock.phase("save"):
                self._save()

    def _note(
        self, step: int, controllers: Controllers | None, imitated: Imitated | None = None
    ) -> None:
        sampler, version = self._parts.prompts.state_dict(), self._parts.generator.version
        self._pause = _Pause(step, controllers, sampler, version, imitated)
        self._is_policy_saved = False

    def _save(self) -> None:
        run_state.save(
            self._parts.policy,
            self._session.run_dir,
            self._state(),
            same_policy=self._is_policy_saved,
            critic=self._parts.critic,
        )
        self._is_saved = self._is_policy_saved = True
        coming = range(self.step + 1, self.step + 2 + self._config.rollout.staleness)
        self.trees.forget(self.trees.steps - {step_name(step) for step in coming})

    def _state(self) -> RunState:
        assert self._pause is not None, "there is a pause before there is something to save"
        pause = self._pause
        return RunState(
            step=pause.step,
            controllers={} if pause.controllers is None else pause.controllers.to_plain(),
            sampler=pause.sampler,
            version=pause.version,
            session=self._session.state(),
            before=None if self.before is None else self.before.to_plain(),
            warm_start=None if pause.warm_start is None else asdict(pause.warm_start),
            evaluated_step=self._evaluated_step,
        )

    def _take_up(self, state: RunState) -> None:
        controllers = Controllers.from_plain(state.controllers) if state.controllers else None
        imitated = None if state.warm_start is None else Imitated(**state.warm_start)
        self.is_begun = imitated is None
        self._pause = _Pause(state.step, controllers, state.sampler, state.version, imitated)
        self.before = None if state.before is None else HeldOut.from_plain(state.before)
        self._evaluated_step = state.evaluated_step
        self._is_policy_saved = True
        self._session.take_up(state.session)
        self._session.note(f"goes on after {self._pause}")
