"""Save a run every few steps, at its end and at a signal.

Between two steps a run is at a boundary: policy, controllers, prompts and the data of the summary
belong together. The boundary is recorded right after each step, while signals are still deferred,
so that until the next update the policy is always that of the last boundary. A rollout that is
running at a signal is dropped; the recorded sampler state still holds its prompts. After a
`kill -9`, what remains is the last checkpoint (`resume.run_state`), from which `resume.restore`
continues, and the trees that have finished since (`tree_store`), which are not sampled again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mega_agentrl.rollout.io.tree_store import TreeStore
from mega_agentrl.train.controllers import Controllers
from mega_agentrl.train.evaluate import ValidationResult
from mega_agentrl.train.resume import run_state
from mega_agentrl.train.resume.run_dir import TREE_STORE_FILE, WARM_START_DIR
from mega_agentrl.train.resume.run_state import RunState
from mega_agentrl.train.scheduler import rollout_stream_name
from mega_agentrl.train.signals import RunInterrupted
from mega_agentrl.train.warm_start import WarmStartCheckpointing, WarmStartProgress

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.run_logger import RunLogger
    from mega_agentrl.train.signals import SignalHandler
    from mega_agentrl.types.components import Components


@dataclass(frozen=True, slots=True)
class _StepBoundary:
    """State of the run right after a step."""

    step: int
    controllers: Controllers | None
    sampler_state: Mapping[str, Any]
    weight_version: int
    warm_start_progress: WarmStartProgress | None = None

    def __str__(self) -> str:
        if self.warm_start_progress is not None:
            return f"step {self.warm_start_progress.step} of the warm start"
        return f"RL step {self.step}"


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
            components: The parts of the run.
            config: Settings of the run.
            logger: Its state is saved and restored with the run.
            signal_handler: Defers signals and limits the time of a save.
            state: State to continue from; None starts the run from its beginning.
        """
        self.signal_handler = signal_handler
        self.validation_before: ValidationResult | None = None
        self.warm_start_done = False
        self._components = components
        self._config = config
        self._logger = logger
        self._boundary: _StepBoundary | None = None
        self._is_saved = True
        self._last_validated_step = 0
        self._is_policy_saved = False
        self.tree_store = TreeStore(logger.run_dir / TREE_STORE_FILE)
        if state is not None:
            self._restore(state)
        if not self.warm_start_done:
            # The trees are of a lost policy; the restarted one uses the same version numbers.
            self.tree_store.drop_steps()
        elif config.rollout.max_staleness:
            # The coming steps are sampled with other weights than before the interruption.
            self.tree_store.drop_newer_than(components.generator.version)

    @property
    def step(self) -> int:
        """Number of finished RL steps."""
        return 0 if self._boundary is None else self._boundary.step

    @property
    def controllers(self) -> Controllers | None:
        """Controllers at the last boundary; None before the first RL step."""
        return None if self._boundary is None else self._boundary.controllers

    def __enter__(self) -> CheckpointManager:
        self.signal_handler.enable_save_timeout()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Any other exception may have come in the middle of an update.
        try:
            if isinstance(error, RunInterrupted):
                self.signal_handler.mark_handled()
                if not self._is_saved:
                    self._logger.print_line(f"{error}: saving the run after {self._boundary}")
                    self._save()
        finally:
            self.signal_handler.disable_save_timeout()

    def warm_start_checkpointing(self) -> WarmStartCheckpointing:
        """Return the hooks that make the warm start resumable."""
        progress = None if self._boundary is None else self._boundary.warm_start_progress
        return WarmStartCheckpointing(
            last_step=progress,
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
            if self._components.open_sft_stream is not None:
                run_state.save_checkpoint(
                    self._components.policy,
                    self._logger.run_dir,
                    self._run_state(),
                    keep=1,
                    name=WARM_START_DIR,
                )

    def record_validation_before(self, before: ValidationResult) -> ValidationResult:
        """Record the validation before RL and return it."""
        # Without training the weights are those of model.path, so there is nothing to save.
        self.validation_before, self._is_saved = before, self._config.is_eval_only
        return before

    @property
    def is_validation_due(self) -> bool:
        """Whether the boundary needs a validation that has not been made yet."""
        every, step = self._config.evaluate.every_steps, self.step
        return every > 0 and step > self._last_validated_step and step % every == 0

    def record_validation(self) -> None:
        """Record that the validation at this boundary has been made and logged."""
        self._last_validated_step, self._is_saved = self.step, False

    def record_step(self, step: int, controllers: Controllers) -> None:
        """Record the boundary after a step, and save it if a checkpoint is due.

        Call it while signals are deferred.
        """
        self._record_boundary(step, controllers)
        self._is_saved = False
        every = self._config.save_every_steps
        if step == self._config.total_steps or (every and step % every == 0):
            with self._logger.phase_timer.phase("save"):
                self._save()

    def _record_boundary(
        self, step: int, controllers: Controllers | None, progress: WarmStartProgress | None = None
    ) -> None:
        sampler_state, weight_version = (
            self._components.prompt_source.state_dict(),
            self._components.generator.version,
        )
        self._boundary = _StepBoundary(step, controllers, sampler_state, weight_version, progress)
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
        assert self._boundary is not None, "a boundary is recorded before anything is saved"
        boundary = self._boundary
        return RunState(
            step=boundary.step,
            controller_state={} if boundary.controllers is None else boundary.controllers.to_dict(),
            sampler_state=boundary.sampler_state,
            weight_version=boundary.weight_version,
            logger_state=self._logger.state_dict(),
            validation_before=None
            if self.validation_before is None
            else self.validation_before.to_dict(),
            warm_start_progress=None
            if boundary.warm_start_progress is None
            else asdict(boundary.warm_start_progress),
            last_validated_step=self._last_validated_step,
        )

    def _restore(self, state: RunState) -> None:
        controllers = (
            Controllers.from_dict(state.controller_state) if state.controller_state else None
        )
        progress = (
            None
            if state.warm_start_progress is None
            else WarmStartProgress(**state.warm_start_progress)
        )
        self.warm_start_done = progress is None
        self._boundary = _StepBoundary(
            state.step, controllers, state.sampler_state, state.weight_version, progress
        )
        self.validation_before = (
            None
            if state.validation_before is None
            else ValidationResult.from_dict(state.validation_before)
        )
        self._last_validated_step = state.last_validated_step
        self._is_policy_saved = True
        self._logger.load_state_dict(state.logger_state)
        self._logger.print_line(f"goes on after {self._boundary}")
