"""Command line: compose the configuration, check it, build the run, train.

Exit codes: 0 done, 2 bad input (one screen, nothing was started), 1 a failure during the
run, 130 interrupted.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mega_agentrl.config.check import check
from mega_agentrl.config.keys import check_files, check_overrides, read_command_line
from mega_agentrl.config.places import config_folder, folder_name
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.train.run_folder import make_room

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


def _fail(message: object, code: int) -> NoReturn:
    print(f"mega_agentrl: {message}", file=sys.stderr)
    sys.exit(code)


def _to_config(composed: DictConfig) -> TrainConfig:
    composed.run_dir = str(Path(HydraConfig.get().runtime.output_dir).resolve())
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig)
    return config


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


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
    except ValueError as error:
        _fail(error, BAD_INPUT)
    run_dir = Path(config.run_dir)
    if (earlier := make_room(run_dir)) is not None:
        print(f"the earlier run in {run_dir} is now {earlier}")
    _log_to_file(run_dir)
    OmegaConf.save(composed, run_dir / "config.yaml", resolve=True)
    # Ray, torch and the rest load only once the configuration is known to be good.
    from mega_agentrl.runtime.build import build
    from mega_agentrl.train.loop import train

    signal.signal(signal.SIGTERM, _interrupt)
    is_built = False
    try:
        with build(config) as parts:
            is_built = True
            return train(parts, config)
    except KeyboardInterrupt:
        _fail(
            "interrupted; every process was ended. There is no checkpoint to resume from: a new "
            f"start begins at step 1. Metrics so far: {run_dir / 'metrics.jsonl'}",
            INTERRUPTED,
        )
    except (ValueError, RuntimeError, OSError) as error:
        logging.exception("the run failed")
        if isinstance(error, ValueError) and not is_built:
            _fail(error, BAD_INPUT)
        _fail(f"{error}\nTraceback and messages of all processes: {run_dir / 'logs'}", FAILED)


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
    """Entry point of `python -m mega_agentrl`."""
    ConfigStore.instance().store(name="schema", node=TrainConfig)
    OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
    folder = config_folder()
    try:
        _check_command_line(folder)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        cause = f": {error.__cause__}" if isinstance(error, HydraException) else ""
        _fail(f"{error}{cause}", BAD_INPUT)
    hydra.main(version_base="1.3", config_path=str(folder), config_name="train")(run)()


if __name__ == "__main__":
    main()
