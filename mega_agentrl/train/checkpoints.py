"""Save a run every few steps, at its end and at a signal.

A boundary is the state between two steps, in which policy, controllers, prompts and the data of the
summary belong together. It is recorded right after each step, while signals are still deferred, so
that until the next update the policy is always that of the last boundary. A rollout that is running
at a signal is dropped; the recorded sampler state still holds its prompts. After a `kill -9`,
`resume.restore` continues from the last checkpoint (`resume.run_state`) and does not sample again
the trees that have finished since (`tree_store`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.rollout.io.tree_store import TreeStore
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.run_dir import TREE_STORE_FILE, WARM_START_DIR
from mega_agentrl.train.resume.run_state import RunState
from mega_agentrl.train.scheduler import rollout_stream_name
from mega_agentrl.train.signals import RunInterrupted
from mega_agentrl.train.warm_start import WarmStartCheckpointing

if TYPE_CHECKING:
    from types import TracebackType

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.controllers import Controllers
    from mega_agentrl.train.evaluate import ValidationResult
    from mega_agentrl.train.run_logger import RunLogger
    from mega_agentrl.train.signals import SignalHandler
    from mega_agentrl.train.warm_start import WarmStartProgress
    from mega_agentrl.types.components import Components


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
        # Any other exception may have been raised during an update, so nothing is saved.
        try:
            if isinstance(error, RunInterrupted):
                self.signal_handler.mark_handled()
                if not self._is_saved:
                    where = self._boundary.position
                    self._logger.print_line(f"{error}: saving the run after {where}")
                    self._save()
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
        every = self._config.save_every_steps
        if step == self._config.total_steps or (every and step % every == 0):
            with self._logger.phase_timer.phase("save"):
                self._save()
        self._logger.finish_step()

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
        run_state.save_checkpoint(
            self._components.policy,
            self._logger.run_dir,
            self._run_state(),
            same_policy=self._is_policy_saved,
            critic=self._components.critic,
        )
        self._is_saved = self._is_policy_saved = True
        upcoming = range(self.step + 1, self.step + 2 + self._config.rollout.max_staleness)
        self.tree_store.drop_steps(
            self.tree_store.steps - {rollout_stream_name(step) for step in upcoming}
        )

    def _run_state(self) -> RunState:
        return replace(self._boundary, logger_state=self._logger.state())
