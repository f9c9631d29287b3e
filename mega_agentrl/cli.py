"""Command line: compose and check the configuration, build the run, train.

If the run folder holds an unfinished run with the same settings, the run resumes (`train.resume`).

Exit codes: 0 success; 1 failure during the run; 2 invalid input, nothing was started; 130 (INT),
143 (TERM) or 75 (USR1) interrupted, after saving a checkpoint if there was anything to save. 75 is
also returned when a critic or reward-model process was lost and the job can resume from a
checkpoint.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from logging.handlers import RotatingFileHandler
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from mega_agentrl.config.checks.cross_section import check_config
from mega_agentrl.config.checks.inputs import check_run_dir
from mega_agentrl.config.help_text import help_text
from mega_agentrl.config.override_keys import (
    CommandLine,
    check_overrides,
    check_yaml_keys,
    compose_settings,
    last_value,
    parse_command_line,
    register_schema,
    repeated_keys,
    replace_rubrics,
)
from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.agent import AGENT_OUTPUT_LOGGER
from mega_agentrl.config.sweep_overrides import without_swept
from mega_agentrl.report.config_diff import complete_settings
from mega_agentrl.report.run_start import append_start
from mega_agentrl.report.terminal_warnings import TerminalWarnings
from mega_agentrl.rollout.gateway.connections import raise_descriptor_limit
from mega_agentrl.runtime.cluster import ClusterConnection
from mega_agentrl.runtime.start_record import collect_start
from mega_agentrl.train import sweep
from mega_agentrl.train.resume.run_dir import (
    CONFIG_FILE,
    METRICS_FILE,
    create_run_dir,
    prepare_run_dir,
    prepare_sweep_dir,
)
from mega_agentrl.train.resume.run_lock import lock_run_dir
from mega_agentrl.train.signals import PROCESS_SIGNAL_HANDLER, RunInterrupted, SignalHandler
from mega_agentrl.types.atomic_file import atomic_write
from mega_agentrl.types.errors import AuxiliaryModelLostError, RunStoppedError

if TYPE_CHECKING:
    from mega_agentrl.runtime.inputs import RunInputs

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_RESTART = 75
_REQUEST_LOGGERS = ("httpx", "httpcore", "openai", "anthropic", "mcp", "LiteLLM")
"""Loggers of libraries that write a line for each request."""
_MAX_AGENT_LOG_BYTES = 16 << 20


def _fail(message: object, code: int) -> NoReturn:
    print(f"mega_agentrl: {message}", file=sys.stderr)
    sys.exit(code)


def _fail_run(message: object, code: int, *, owns_folder: bool = True) -> NoReturn:
    """End a failed run and the process; in a sweep, end only this job.

    `owns_folder` is false if another process runs in the folder.
    """
    if not _in_sweep():
        _fail(message, code)
    hydra_config = HydraConfig.get()
    run_dir = Path(hydra_config.runtime.output_dir)
    if owns_folder:
        sweep.write_job_file(run_dir, hydra_config.overrides.task, failed=str(message))
    raise sweep.SweepJobFailed(f"mega_agentrl: {run_dir.name}: {message}")


def _in_sweep() -> bool:
    return bool(HydraConfig.get().mode is RunMode.MULTIRUN)


def _to_config(composed: DictConfig) -> TrainConfig:
    replace_rubrics(composed, list(HydraConfig.get().overrides.task))
    composed.run_dir = str(Path(HydraConfig.get().runtime.output_dir).resolve())
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    return config


def _set_up_file_logging(run_dir: Path) -> None:
    """Send the driver's log messages to a file; the screen shows progress and warnings."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=run_dir / "logs" / "driver.log",
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        level=logging.INFO,
        force=True,
    )
    logging.captureWarnings(True)
    for name in _REQUEST_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    # In a sweep this process may run several jobs.
    logging.getLogger("mega_agentrl").handlers = [TerminalWarnings()]
    output = logging.getLogger(AGENT_OUTPUT_LOGGER)
    output.propagate = False
    output.handlers = [
        RotatingFileHandler(
            run_dir / "logs" / "agents.log",
            maxBytes=_MAX_AGENT_LOG_BYTES,
            backupCount=3,
            delay=True,
        )
    ]


def run(composed: DictConfig) -> float:
    """Run one training and return the held-out reward, which sweepers optimize."""
    try:
        config = _to_config(composed)
        check_config(config)
    except ValueError as error:
        _fail_run(error, EXIT_BAD_INPUT)
    raise_descriptor_limit()
    run_dir = Path(config.run_dir)
    with ExitStack() as stack:
        _open_run_dir(config, _settings_text(composed), stack)
        _set_up_file_logging(run_dir)
        # A sweep launcher calls `run` without `__main__`, which installs the handlers otherwise.
        PROCESS_SIGNAL_HANDLER.install()
        cluster = stack.enter_context(ClusterConnection(config))
        inputs = _read_inputs(config, run_dir, cluster)
        if inputs.total_steps != config.total_steps:
            config = _set_total_steps(config, inputs.total_steps)
            composed.total_steps = inputs.total_steps
            atomic_write(run_dir / CONFIG_FILE, _settings_text(composed))
        return _train(config, inputs, run_dir, cluster)


def _settings_text(composed: DictConfig) -> str:
    """Return all settings as yaml, with the options of the algorithm that are not set."""
    settings: Any = OmegaConf.to_container(composed, resolve=True, enum_to_str=True)
    return OmegaConf.to_yaml(OmegaConf.create(complete_settings(settings)))


def _open_run_dir(config: TrainConfig, settings: str, stack: ExitStack) -> None:
    """Lock the run folder for as long as `stack` is open, prepare it, and record the start."""
    run_dir, hydra_config = Path(config.run_dir), HydraConfig.get()
    try:
        create_run_dir(run_dir)
        stack.enter_context(lock_run_dir(run_dir))
    except ValueError as error:
        _fail_run(error, EXIT_BAD_INPUT, owns_folder=False)
    try:
        is_resumed, renamed_dir = prepare_run_dir(run_dir, settings, resume=config.resume)
        if renamed_dir is not None:  # the lock has moved with the earlier run, and is kept, too
            stack.enter_context(lock_run_dir(run_dir))
    except ValueError as error:
        _fail_run(error, EXIT_BAD_INPUT)
    if _in_sweep():
        sweep.write_job_file(run_dir, hydra_config.overrides.task)
    if is_resumed:
        print(f"continuing the run in {run_dir}")
    if renamed_dir is not None:
        print(f"moved the earlier run in {run_dir} to {renamed_dir}")
    choices = hydra_config.runtime.choices
    presets = {
        group: str(option)
        for group, option in choices.items()
        if option is not None and not group.startswith("hydra/")
    }
    append_start(run_dir, collect_start(hydra_config.overrides.task, presets))


def _set_total_steps(config: TrainConfig, total_steps: int) -> TrainConfig:
    """Return the configuration with the steps that `total_epochs` amounts to, after its checks."""
    try:
        check_config(replace(config, total_steps=total_steps, total_epochs=0))
        return replace(config, total_steps=total_steps)
    except ValueError as error:
        _fail_run(error, EXIT_BAD_INPUT)


def _read_inputs(config: TrainConfig, run_dir: Path, cluster: ClusterConnection) -> RunInputs:
    """Read and check the inputs that the configuration names.

    Once the prompts are valid, import the user's algorithm and let Ray start in the background.
    """
    from mega_agentrl.runtime.inputs import read_inputs

    def begin() -> None:
        load_user_algorithm(config)  # after the data and the tools, because it imports torch
        cluster.begin()

    try:
        with PROCESS_SIGNAL_HANDLER.limit_start():  # Ray waits a minute for servers that have ended
            inputs = read_inputs(config, begin)
    except ValueError as error:
        logging.exception("the input is invalid")
        _fail_run(error, EXIT_BAD_INPUT)
    except (RuntimeError, OSError) as error:
        logging.exception("the input cannot be read")
        _fail_run(f"{error}\n{_log_hint(run_dir)}", EXIT_FAILED)
    return inputs


def load_user_algorithm(config: TrainConfig) -> None:
    """Import the user's advantage, loss and branching rule; `check_config` has read them."""
    if config.algo.has_user_advantage:
        from mega_agentrl.train.estimators.registry import load_user_advantage

        load_user_advantage(config.algo.advantage)
    if config.algo.has_user_loss:
        from mega_agentrl.actor.training.losses import load_user_loss

        load_user_loss(config.algo.loss)
    if config.rollout.has_user_branching:
        from mega_agentrl.rollout.branching.policy import load_user_branching

        load_user_branching(config.rollout.branching)


def _train(
    config: TrainConfig, inputs: RunInputs, run_dir: Path, cluster: ClusterConnection
) -> float:
    """Build the run and train; write the report page last if the run ends early."""
    is_built = needs_report = False
    failure = ""
    try:
        with ExitStack() as stack:
            with PROCESS_SIGNAL_HANDLER.limit_start():
                # Ray and torch are imported only after the input has been checked.
                from mega_agentrl.runtime.build import build
                from mega_agentrl.train.trainer import train_with_restarts

                components = stack.enter_context(build(config, inputs, cluster))
            is_built = needs_report = True
            # Without this, full collections of the many objects that the imports created would
            # repeatedly stop all rollouts and agents for more than a tenth of a second.
            gc.collect()
            gc.freeze()
            reward = train_with_restarts(components, config, PROCESS_SIGNAL_HANDLER)
        needs_report = False
    except KeyboardInterrupt as stop:
        # Any other exception means a second signal: there is no time for a report.
        needs_report = needs_report and isinstance(stop, RunInterrupted)
        _fail(
            describe_interruption(run_dir, PROCESS_SIGNAL_HANDLER), PROCESS_SIGNAL_HANDLER.exit_code
        )
    except (ValueError, RuntimeError, OSError, RunStoppedError) as error:
        logging.exception("the run failed")
        failure = str(error)
        if isinstance(error, ValueError) and not is_built:
            _fail_run(error, EXIT_BAD_INPUT)
        message, code = describe_failure(error, run_dir)
        _fail_run(f"{message}\n{_log_hint(run_dir)}", code)
    finally:
        if needs_report:
            from mega_agentrl.train.output.report_page import (
                FAILED_TIMEOUT_S,
                INTERRUPTED_TIMEOUT_S,
                write_interrupted_report,
            )

            deadline_s = (
                FAILED_TIMEOUT_S
                if PROCESS_SIGNAL_HANDLER.received_signal is None
                else INTERRUPTED_TIMEOUT_S
            )
            write_interrupted_report(run_dir, deadline_s=deadline_s, failure=failure)
    return reward


def _log_hint(run_dir: Path) -> str:
    return f"Traceback and messages of all processes: {run_dir / 'logs'}"


def describe_failure(error: Exception, run_dir: Path) -> tuple[str, int]:
    """Return the message and the exit code of a failed run."""
    from mega_agentrl.train.resume.run_state import valid_checkpoints

    can_resume = isinstance(error, AuxiliaryModelLostError | RunStoppedError)
    if not can_resume or not (folders := valid_checkpoints(run_dir)):
        return str(error), EXIT_FAILED
    code = EXIT_FAILED if isinstance(error, RunStoppedError) else EXIT_RESTART
    return f"{error}\nThe same command resumes the run from {folders[0]}.", code


def describe_interruption(run_dir: Path, handler: SignalHandler) -> str:
    """Return the message of an interrupted run: which checkpoint exists and how to resume."""
    from mega_agentrl.train.resume.run_state import read_run_state, valid_checkpoints

    cause = "" if handler.received_signal is None else f" ({Signals(handler.received_signal).name})"
    message = f"interrupted{cause}; every process was ended. "
    if folders := valid_checkpoints(run_dir):
        position = read_run_state(folders[0]).position
        message += f"The same command resumes the run after {position}, from {folders[0]}."
    else:
        message += "There is no checkpoint to resume from: the same command starts at step 1."
    metrics = run_dir / METRICS_FILE
    return f"{message} Metrics so far: {metrics}" if metrics.exists() else message


def _check_command_line(line: CommandLine, folder: Path) -> None:
    """Check the names of overrides, then their values; then create the folder of the run or sweep.

    Hydra's own errors say less and exit with code 1.
    """
    check_yaml_keys(folder)
    check_overrides(line.overrides, folder, *line.config_dirs)
    # Hydra composes each job of a sweep, and reports what is wrong with the values in it.
    overrides = without_swept(line.overrides) if line.is_sweep else line.overrides
    composed = compose_settings(overrides, folder, *line.config_dirs)
    for warning in repeated_keys(line.overrides):
        print(f"mega_agentrl: {warning}", file=sys.stderr)
    if not line.starts_run:
        return
    if not line.is_sweep:
        _check_values(composed)
    _check_run_dir(line, composed)


def _check_values(composed: DictConfig) -> None:
    """Check the configuration of a run, before there is a folder for it."""
    try:
        config = OmegaConf.to_object(composed)
    except InterpolationResolutionError:  # only Hydra can resolve it; `run` checks the rest
        return
    assert isinstance(config, TrainConfig)
    check_config(config)


def _check_run_dir(line: CommandLine, composed: DictConfig) -> None:
    """Create the folder of the run or sweep; on failure Hydra would print a traceback.

    A path with an interpolation is only checked: Hydra may resolve it to another path later (the
    time of day), or only Hydra can resolve it (`${hydra.job.num}`).
    """
    key = "hydra.sweep.dir" if line.is_sweep else "hydra.run.dir"
    given = last_value(line.overrides, key)  # replaces run_dir
    if "${" in str(given or ""):
        return
    if given is None and OmegaConf.is_interpolation(composed, "run_dir"):
        with suppress(OmegaConfBaseException):
            check_run_dir(composed.run_dir)
        return
    folder = Path(str(given or composed.run_dir))
    create_run_dir(folder)
    moved_to = prepare_sweep_dir(folder, resume=composed.resume) if line.is_sweep else None
    if moved_to is not None:
        print(f"moved the earlier run in {folder} to {moved_to}")


def _print_help(text: str) -> None:
    """Print a text; ignore that the reader closed the pipe, as in `--help | head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Python flushes again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Check the command line, then run the configuration that Hydra composes from it."""
    try:
        line = parse_command_line(sys.argv[1:])
        folder = find_config_dir()
        if line.asks_help:
            _print_help(help_text(line.overrides, folder, *line.config_dirs))
            return
        register_schema()
        _check_command_line(line, folder)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ if isinstance(error, HydraException) else None
        _fail(f"{error}: {cause}" if cause else error, EXIT_BAD_INPUT)
    try:
        hydra.main(version_base="1.3", config_path=str(folder), config_name="train")(run)()
    finally:
        sweep.write_sweep_reports()
