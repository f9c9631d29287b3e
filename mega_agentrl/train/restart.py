"""A run whose policy dies goes on in place: new ranks, and everything as at the last checkpoint.

The engines, the sandboxes and Ray stay. What follows is what the same command would do after the
death of the whole run (`resume`), so a restart gives nothing that a new start would not. Ended are
runs that get nowhere: `MAX_WITHOUT_PROGRESS` deaths between two checkpoints are no accident.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.train import run_state
from mega_agentrl.train.loop import train
from mega_agentrl.types.faults import RankLostError

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.stopping import Stopper
    from mega_agentrl.types.parts import Parts

MAX_WITHOUT_PROGRESS = 3

_logger = logging.getLogger(__name__)


def train_to_the_end(parts: Parts, config: TrainConfig, stopper: Stopper) -> float:
    """`train`, again from the last checkpoint wherever a rank of the policy is lost.

    Raises `RankLostError` for the last of too many losses, and what `train` and the start of the
    ranks raise.
    """
    beginning = parts.prompts.state_dict()
    newest, num_losses = _newest(config), 0
    while True:
        try:
            return train(parts, config, stopper)
        except RankLostError as error:
            before, newest = newest, _newest(config)
            num_losses = num_losses + 1 if before == newest else 1
            _logger.warning("the policy is lost (%d): %s", num_losses, error)
            if num_losses >= MAX_WITHOUT_PROGRESS:
                raise
            where = "the beginning" if newest is None else newest
            print(f"the policy is restarted from {where}: {error}", file=sys.stderr)
        stopper.check()
        start_s = time.perf_counter()
        parts.policy.restart()
        parts.prompts.leave_out(None)
        parts.prompts.load_state_dict(beginning)
        if newest is None:
            parts.policy.send_weights(parts.generator, version=0)
        parts = replace(parts, start_s=time.perf_counter() - start_s)


def _newest(config: TrainConfig) -> Path | None:
    return next(iter(run_state.whole_ones(Path(config.run_dir))), None)
