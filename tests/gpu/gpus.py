"""What a test on GPUs needs of this machine, and a run's settings for as many as there are."""

from __future__ import annotations

import pytest
import torch

FOUND = torch.cuda.device_count()

SMOKE_LAYOUTS = {
    1: ["parallel=single", "cluster.colocated=true"],
    2: ["parallel=single"],
    3: [],
    4: ["engine.tensor=2"],
    6: ["parallel=tp2_pp2", "engine.tensor=2"],
    8: ["parallel=tp2_pp2", "engine.tensor=2", "cluster.num_engines=2"],
}
"""Overrides of the smoke run that take this many GPUs. On one, policy and engine take turns, and
the engine sleeps; from two on each rank has its own."""


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skips where there are fewer, and says so."""
    unit = "GPU" if count == 1 else "GPUs"
    return pytest.mark.skipif(count > FOUND, reason=f"needs {count} {unit}, {FOUND} found")
