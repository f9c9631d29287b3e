"""The learning rate of an optimizer step, as a pure function of its number.

With W warm-up steps and a run of D steps:

    step < W    lr * (step + 1) / W             linear warm-up
    else        x = (step - W) / (D - W), 1 after D
      constant  lr
      linear    min_lr + (lr - min_lr) * (1 - x)
      cosine    min_lr + (lr - min_lr) * (1 + cos(pi * x)) / 2     (arXiv:1608.03983, eq. 5)

The caller counts the steps and decides whether skipped steps count.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import LrSchedule

if TYPE_CHECKING:
    from mega_agentrl.config.schema import OptimConfig


def compute_learning_rate(step: int, settings: OptimConfig, total_steps: int) -> float:
    """Compute the learning rate of optimizer step `step`, counted from 0.

    Raises:
        ValueError: If `step` is negative or `total_steps`, the optimizer steps of the whole
            run, is below 1.
    """
    if step < 0 or total_steps < 1:
        raise ValueError(
            f"learning_rate: got step={step}, total_steps={total_steps}; expected step at least "
            "0 and total_steps at least 1; probable cause: a run of 0 steps"
        )
    if step < settings.lr_warmup_steps:
        return settings.lr * (step + 1) / settings.lr_warmup_steps
    if settings.lr_schedule == LrSchedule.constant:
        return settings.lr
    done = 1.0
    if step < total_steps:
        done = (step - settings.lr_warmup_steps) / (total_steps - settings.lr_warmup_steps)
    if settings.lr_schedule == LrSchedule.linear:
        left = 1.0 - done
    else:
        left = (1.0 + math.cos(math.pi * done)) / 2.0
    return settings.min_lr + (settings.lr - settings.min_lr) * left
