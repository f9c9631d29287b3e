"""Restart a lost policy in place, and continue the run from its last checkpoint.

The engines, the sandboxes and Ray keep running. Everything else is what a new start of the same
command would do (`restore`), so both give the same result. After `MAX_FAILURES_WITHOUT_PROGRESS`
losses between two checkpoints the run ends with the error.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.train.resume import run_state
from mega_agentrl.train.trainer import train
from mega_agentrl.types.errors import RankLostError

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.train.signals import SignalHandler
    from mega_agentrl.types.components import Components

MAX_FAILURES_WITHOUT_PROGRESS = 3

_logger = logging.getLogger(__name__)


def train_with_restarts(
    components: Components, config: TrainConfig, signal_handler: SignalHandler
) -> float:
    """Call `train`, again from the last checkpoint whenever a policy rank is lost.

    Raises:
        RankLostError: The policy was lost too often without a new checkpoint.
    """
    initial_sampler_state = components.prompt_source.state_dict()
    newest_checkpoint, num_failures = _newest_checkpoint(config), 0
    while True:
        try:
            return train(components, config, signal_handler)
        except RankLostError as error:
            previous_checkpoint, newest_checkpoint = newest_checkpoint, _newest_checkpoint(config)
            num_failures = num_failures + 1 if previous_checkpoint == newest_checkpoint else 1
            _logger.warning("the policy is lost (%d): %s", num_failures, error)
            if num_failures >= MAX_FAILURES_WITHOUT_PROGRESS:
                raise
            where = "the beginning" if newest_checkpoint is None else newest_checkpoint
            print(f"the policy is restarted from {where}: {error}", file=sys.stderr)
        signal_handler.raise_if_signalled()
        start_s = time.perf_counter()
        components.policy.restart()
        components.prompt_source.exclude(None)
        components.prompt_source.load_state_dict(initial_sampler_state)
        if newest_checkpoint is None:
            components.policy.sync_weights(components.generator, version=0)
        components = replace(components, startup_s=time.perf_counter() - start_s)


def _newest_checkpoint(config: TrainConfig) -> Path | None:
    return next(iter(run_state.valid_checkpoints(Path(config.run_dir))), None)
