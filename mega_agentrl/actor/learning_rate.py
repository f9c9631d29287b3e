"""The learning rate of an optimizer step, as a pure function of its number.

With W warm-up steps and a run of D steps:

    step < W    lr * (step + 1) / W             a straight rise from 0
    else        x = (step - W) / (D - W), held at 1 after D
      constant  lr
      linear    min_lr + (lr - min_lr) * (1 - x)
      cosine    min_lr + (lr - min_lr) * (1 + cos(pi * x)) / 2     (arXiv:1608.03983, eq. 5)

It counts nothing: the caller says which step it is. Steps that were skipped are its business.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import LrSchedule

if TYPE_CHECKING:
    from mega_agentrl.config.schema import OptimConfig


def learning_rate(step: int, settings: OptimConfig, total_steps: int) -> float:
    """Learning rate of step number `step`, which counts from 0.

    total_steps: optimizer steps of the whole run. Raises `ValueError` for a negative step or a
    run without steps.
    """
    if step < 0 or total_steps < 1:
        raise ValueError(
            f"learning_rate: got step={step}, total_steps={total_steps}; expected step at least "
            "0 and total_steps at least 1; probable cause: a run of 0 steps"
        )
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == LrSchedule.constant:
        return settings.lr
    done = 1.0
    if step < total_steps:
        done = (step - settings.warmup_steps) / (total_steps - settings.warmup_steps)
    if settings.schedule == LrSchedule.linear:
        left = 1.0 - done
    else:
        left = (1.0 + math.cos(math.pi * done)) / 2.0
    return settings.min_lr + (settings.lr - settings.min_lr) * left
