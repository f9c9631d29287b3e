"""Command line: compose the configuration, check it, build the run, train.

A folder with an unfinished run of the same settings goes on (`train.run_folder`, `train.resume`).

Exit codes: 0 done, 2 bad input (one screen, nothing was started), 1 a failure during the
run, 130 (INT), 143 (TERM) or 75 (USR1) interrupted and, where there was something to save, saved.
75 as well where a process of critic or reward model was lost and a new start goes on behind it.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mega_agentrl.config.check import check
from mega_agentrl.config.keys import check_files, check_overrides, read_command_line
from mega_agentrl.config.places import config_folder, folder_name
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.train import sweep
from mega_agentrl.train.run_folder import METRICS, make_room
from mega_agentrl.train.stopping import PROCESS, Stopped, Stopper
from mega_agentrl.types.faults import ModelLostError

if TYPE_CHECKING:
    from mega_agentrl.runtime.inputs import Inputs

FAILED = 1
BAD_INPUT = 2
START_AGAIN = 75


def _fail(message: object, code: int) -> NoReturn:
    print(f"mega_agentrl: {message}", file=sys.stderr)
    sys.exit(code)


def _give_up(message: object, code: int) -> NoReturn:
    """End a run that failed, and the process, but not the sweep that the run is a job of."""
    if not _in_sweep():
        _fail(message, code)
    hydra_config = HydraConfig.get()
    run_dir = Path(hydra_config.runtime.output_dir)
    sweep.note_job(run_dir, hydra_config.overrides.task, failed=str(message))
    raise sweep.JobFailed(f"mega_agentrl: {run_dir.name}: {message}")


def _in_sweep() -> bool:
    return bool(HydraConfig.get().mode is RunMode.MULTIRUN)


def _to_config(composed: DictConfig) -> TrainConfig:
    composed.run_dir = str(Path(HydraConfig.get().runtime.output_dir).resolve())
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    return config


def _log_to_file(run_dir: Path) -> None:
    """Library messages of the driver go to a file; the screen belongs to the progress."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=run_dir / "logs" / "driver.log",
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        level=logging.INFO,
        force=True,
    )
    logging.captureWarnings(True)


def run(composed: DictConfig) -> float:
    """One run; returns the held-out reward, so that sweepers can compare runs."""
    try:
        config = _to_config(composed)
        check(config)
        run_dir = Path(config.run_dir)
        settings = OmegaConf.to_yaml(composed, resolve=True)
        goes_on, earlier = make_room(run_dir, settings, resume=config.resume)
    except ValueError as error:
        _give_up(error, BAD_INPUT)
    if _in_sweep():
        sweep.note_job(run_dir, HydraConfig.get().overrides.task)
    if goes_on:
        print(f"there is an unfinished run in {run_dir}, which goes on")
    if earlier is not None:
        print(f"the earlier run in {run_dir} is now {earlier}")
    _log_to_file(run_dir)
    # Again: a launcher of sweeps starts `run` without `__main__`.
    PROCESS.listen()
    return _train(config, _read(config, run_dir), run_dir)


def _read(config: TrainConfig, run_dir: Path) -> Inputs:
    """Read and check what the configuration names; nothing is started."""
    from mega_agentrl.runtime.inputs import read_inputs

    try:
        if config.algo.is_own:
            from mega_agentrl.train.own_advantage import load

            load(config.algo.advantage)
        return read_inputs(config)
    except ValueError as error:
        logging.exception("the input is bad")
        _give_up(error, BAD_INPUT)
    except (RuntimeError, OSError) as error:
        logging.exception("the input cannot be read")
        _give_up(f"{error}\n{_logs(run_dir)}", FAILED)


def _train(config: TrainConfig, inputs: Inputs, run_dir: Path) -> float:
    """Build the run and train; where it ends before its end, the page is written last of all."""
    # Ray, torch and the rest load only once the input is known to be good.
    from mega_agentrl.runtime.build import build
    from mega_agentrl.train.last_page import FAILED_S, STOPPED_S, write_last_page
    from mega_agentrl.train.restart import train_to_the_end

    is_built = owes_page = False
    try:
        with build(config, inputs) as parts:
            is_built = owes_page = True
            reward = train_to_the_end(parts, config, PROCESS)
        owes_page = False
    except KeyboardInterrupt as stop:
        # Anything else is a second signal, or there is no time left.
        owes_page = owes_page and isinstance(stop, Stopped)
        _fail(farewell(run_dir, PROCESS), PROCESS.exit_code)
    except (ValueError, RuntimeError, OSError) as error:
        logging.exception("the run failed")
        if isinstance(error, ValueError) and not is_built:
            _give_up(error, BAD_INPUT)
        said, code = verdict(error, run_dir)
        _give_up(f"{said}\n{_logs(run_dir)}", code)
    finally:
        if owes_page:
            deadline_s = FAILED_S if PROCESS.asked is None else STOPPED_S
            write_last_page(run_dir, deadline_s=deadline_s)
    return reward


def _logs(run_dir: Path) -> str:
    return f"Traceback and messages of all processes: {run_dir / 'logs'}"


def verdict(error: Exception, run_dir: Path) -> tuple[str, int]:
    """What to say of a run that failed, and its exit code."""
    from mega_agentrl.train.run_state import whole_ones

    if not isinstance(error, ModelLostError) or not (folders := whole_ones(run_dir)):
        return str(error), FAILED
    return f"{error}\nThe run is kept: the same command goes on from {folders[0]}.", START_AGAIN


def farewell(run_dir: Path, stopper: Stopper) -> str:
    """What somebody who interrupted a run wants to know: what is kept, and how to go on."""
    from mega_agentrl.actor.checkpoint_folder import Manifest
    from mega_agentrl.train.run_state import RunState, whole_ones

    why = "" if stopper.asked is None else f" ({Signals(stopper.asked).name})"
    said = f"interrupted{why}; every process was ended. "
    if folders := whole_ones(run_dir):
        state = RunState.from_plain(Manifest.read(folders[0]).extra)
        where = f"RL step {state.step}"
        if state.warm_start is not None:
            where = f"step {state.warm_start['step']} of the warm start"
        said += f"The same command goes on after {where}, from {folders[0]}."
    else:
        said += "There is no checkpoint to resume from: a new start begins at step 1."
    return f"{said} Metrics so far: {run_dir / METRICS}"


def _check_command_line(folder: Path) -> None:
    """Names, then values: Hydra itself would say less and exit with 1."""
    overrides, extra_folders = read_command_line(sys.argv[1:])
    check_files(folder)
    check_overrides(overrides, folder, *extra_folders)
    if {"-m", "--multirun", "--help", "-h", "--hydra-help", "--info", "-i"} & set(sys.argv):
        return
    with initialize_config_dir(str(folder), version_base="1.3"):
        compose("train", overrides)


def main() -> None:
    """Check the command line, then run what Hydra composes from it."""
    ConfigStore.instance().store(name="schema", node=TrainConfig)
    OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
    folder = config_folder()
    try:
        _check_command_line(folder)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        cause = f": {error.__cause__}" if isinstance(error, HydraException) else ""
        _fail(f"{error}{cause}", BAD_INPUT)
    try:
        hydra.main(version_base="1.3", config_path=str(folder), config_name="train")(run)()
    finally:
        sweep.finish()
