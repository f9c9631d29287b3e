"""Save a run every few steps, at its end and at a signal.

The ranks copy their state, and write it while the next steps run; `PendingCheckpoint` is committed
when they are done: looked at after the rollouts of a step and at its end, before the next save, and
before the run ends. Until then the previous checkpoint is the newest. A save that fails is one
line, and repeated at the next boundary; if it fails again, the run ends with the error.

A boundary is the state between two steps, in which policy, controllers, prompts and the data of the
summary belong together. It is recorded right after each step, while signals are still deferred, so
that until the next update the policy is always that of the last boundary. A rollout that is running
at a signal is dropped; the recorded sampler state still holds its prompts. After a `kill -9`,
`resume.restore` continues from the last checkpoint (`resume.run_state`) and does not sample again
the trees that have finished since (`tree_store`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.io.tree_store import TreeStore
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.run_dir import TREE_STORE_FILE, WARM_START_DIR
from mega_agentrl.train.resume.run_state import RunState
from mega_agentrl.train.scheduler import rollout_stream_name
from mega_agentrl.train.signals import RunInterrupted
from mega_agentrl.train.warm_start import WarmStartCheckpointing
from mega_agentrl.types.errors import AuxiliaryModelLostError, RankLostError

if TYPE_CHECKING:
    from types import TracebackType

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.train.evaluate import ValidationResult
    from mega_agentrl.train.resume.pending_checkpoint import PendingCheckpoint
    from mega_agentrl.train.run_logger import RunLogger
    from mega_agentrl.train.signals import SignalHandler
    from mega_agentrl.train.warm_start import WarmStartProgress
    from mega_agentrl.types.components import Components

_MAX_FAILED_SAVES = 1
"""Saves that may fail one after another without ending the run."""


class CheckpointManager:
    """Saves and restores one run; a context manager around all of it.

    Validations within RL belong to the boundary at which they are made: a run that continues from a
    boundary repeats a validation that is missing there.
    """

    def __init__(
        self,
        components: Components,
        config: TrainConfig,
        logger: RunLogger,
        signal_handler: SignalHandler,
        state: RunState | None,
    ) -> None:
        """Restore `state` if there is one.

        Args:
            components: The components of the run.
            config: Settings of the run.
            logger: Its state is saved and restored with the run.
            signal_handler: Defers signals and limits the time of a save.
            state: State to continue from; None starts the run from its beginning.
        """
        self.signal_handler = signal_handler
        self.warm_start_done = state is not None and state.warm_start_progress is None
        self._components = components
        self._config = config
        self._logger = logger
        # The state at the last boundary; that of the logger is added when it is saved.
        self._boundary = state or RunState(step=0, sampler_state={})
        self._is_saved = True
        self._is_policy_saved = state is not None
        self._pending: PendingCheckpoint | None = None
        self._num_failed_saves = 0
        self.tree_store = TreeStore(logger.run_dir / TREE_STORE_FILE)
        if state is not None:
            logger.load_state(state.logger_state)
            logger.print_line(f"continuing after {state.position}")
        if not self.warm_start_done:
            # A lost policy sampled the trees; the restarted one uses the same version numbers.
            self.tree_store.drop_steps()
        elif config.rollout.max_staleness:
            # The next steps are sampled with other weights than before the interruption.
            self.tree_store.drop_newer_than(components.generator.version)

    @property
    def step(self) -> int:
        """Number of finished RL steps."""
        return self._boundary.step

    @property
    def controllers(self) -> Controllers | None:
        """Controllers at the last boundary; None before the first RL step."""
        return self._boundary.controllers

    @property
    def validation_before(self) -> ValidationResult | None:
        """Validation before RL; None if it has not been made yet."""
        return self._boundary.validation_before

    def __enter__(self) -> CheckpointManager:
        self.signal_handler.enable_save_timeout()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, RunInterrupted):
                self.signal_handler.mark_handled()
                self._commit_pending()
                if not self._is_saved:
                    where = self._boundary.position
                    self._logger.print_line(f"{error}: saving the run after {where}")
                while not self._is_saved:
                    self._save()
                    self._commit_pending()
            elif isinstance(error, Exception) and not isinstance(error, RankLostError):
                # It may have been raised during an update, so only an earlier copy is saved.
                self._num_failed_saves = 0
                with suppress(AuxiliaryModelLostError, RankLostError):
                    self._commit_pending()
        finally:
            self.signal_handler.disable_save_timeout()

    def warm_start_checkpointing(self) -> WarmStartCheckpointing:
        """Return the hooks that make the warm start resumable."""
        return WarmStartCheckpointing(
            last_step=self._boundary.warm_start_progress,
            defer_signals=self.signal_handler.defer_signals,
            record_step=self._record_warm_start_step,
        )

    def _record_warm_start_step(self, progress: WarmStartProgress) -> None:
        self._record_boundary(0, None, progress)
        self._is_saved = False

    def record_warm_start_done(self) -> None:
        """Record that the policy is ready for RL and served; after a warm start, save it."""
        with self.signal_handler.defer_signals():
            self._record_boundary(0, None)
            self.warm_start_done = self._is_saved = True
            if self._components.make_demonstration_batches is not None:
                # Waits: no checkpoint of RL may exist without its reference.
                run_state.save_checkpoint(
                    self._components.policy,
                    self._logger.run_dir,
                    self._run_state(),
                    keep=1,
                    name=WARM_START_DIR,
                )

    def record_validation_before(self, before: ValidationResult) -> ValidationResult:
        """Record the validation before RL and return it."""
        self._boundary = replace(self._boundary, validation_before=before)
        # Without training the weights are those of model.path, so there is nothing to save.
        self._is_saved = self._config.is_eval_only
        return before

    @property
    def is_validation_due(self) -> bool:
        """Whether the boundary needs a validation that has not been made yet."""
        every, step = self._config.evaluate.every_steps, self.step
        return every > 0 and step > self._boundary.last_validated_step and step % every == 0

    def record_validation(self) -> None:
        """Record that the validation at this boundary has been made and logged."""
        self._boundary = replace(self._boundary, last_validated_step=self.step)
        self._is_saved = False

    def record_step(self, step: int, controllers: Controllers) -> None:
        """Record the boundary after a step, save it if a checkpoint is due, and finish its line.

        Call it while signals are deferred.
        """
        self._record_boundary(step, controllers)
        self._is_saved = False
        self.commit_if_written()
        every = self._config.save_every_steps
        is_due = step == self._config.total_steps or (every and step % every == 0)
        if is_due or self._num_failed_saves:
            with self._logger.phase_timer.phase("save"):
                self._save()
        self._logger.finish_step()

    def commit_if_written(self) -> None:
        """Commit the pending checkpoint, if there is one and its ranks are done."""
        if self._pending is not None:
            with self._logger.phase_timer.phase("save"), self._survive_failed_save():
                if self._pending.commit_if_written():
                    self._on_committed()

    def finish(self) -> None:
        """Wait for the last checkpoint, at the end of the run."""
        with self.signal_handler.defer_signals():
            self._commit_pending()
            while self._num_failed_saves:
                self._save()
                self._commit_pending()

    def _record_boundary(
        self, step: int, controllers: Controllers | None, progress: WarmStartProgress | None = None
    ) -> None:
        self._boundary = replace(
            self._boundary,
            step=step,
            sampler_state=self._components.prompt_source.state_dict(),
            controllers=controllers,
            weight_version=self._components.generator.version,
            warm_start_progress=progress,
        )
        self._is_policy_saved = False

    def _save(self) -> None:
        """Start to save the boundary, after the commit of an earlier one."""
        self._commit_pending()
        with self._survive_failed_save():
            self._pending = run_state.start_checkpoint(
                self._components.policy,
                self._logger.run_dir,
                self._run_state(),
                same_policy=self._is_policy_saved,
                critic=self._components.critic,
            )
            self._is_saved = self._is_policy_saved = True

    def _commit_pending(self) -> None:
        """Wait for the files of the pending checkpoint, if there is one, and commit it."""
        if self._pending is not None:
            with self._survive_failed_save():
                self._pending.commit(self._config.cluster.call_timeout_s)
                self._on_committed()

    def _on_committed(self) -> None:
        assert self._pending is not None
        saved_step, self._pending, self._num_failed_saves = self._pending.step, None, 0
        # Trees of later steps are in no checkpoint yet.
        upcoming = range(saved_step + 1, self.step + 2 + self._config.rollout.max_staleness)
        self.tree_store.drop_steps(
            self.tree_store.steps - {rollout_stream_name(step) for step in upcoming}
        )

    @contextmanager
    def _survive_failed_save(self) -> Iterator[None]:
        """Drop a save that fails in the body, with a line, unless too many have failed."""
        try:
            yield
        except (AuxiliaryModelLostError, RankLostError):
            raise
        except (OSError, RuntimeError, ValueError) as error:
            pending, self._pending = self._pending, None
            if pending is not None:
                pending.abandon()
            self._is_saved = self._is_policy_saved = False
            self._num_failed_saves += 1
            if self._num_failed_saves > _MAX_FAILED_SAVES:
                raise
            self._logger.print_line(
                f"a checkpoint was not saved, and the previous one stays the newest: {error}"
            )

    def _run_state(self) -> RunState:
        return replace(self._boundary, logger_state=self._logger.state())
