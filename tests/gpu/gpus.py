"""Skip markers by number of GPUs, and overrides of the smoke run by number of GPUs."""

from __future__ import annotations

import pytest
import torch

FOUND = torch.cuda.device_count()

SMOKE_LAYOUTS = {
    1: ["parallel=single", "cluster.colocated=true"],
    2: ["parallel=single"],
    3: [],
    4: ["engine.tensor_parallel_size=2"],
    6: ["parallel=tp2_pp2", "engine.tensor_parallel_size=2"],
    8: ["parallel=tp2_pp2", "engine.tensor_parallel_size=2", "cluster.num_engines=2"],
}
"""Overrides of the smoke run by number of GPUs. On one GPU, policy and engine take turns and the
engine sleeps meanwhile; from two on each rank has its own GPU."""


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skip a test if the machine has fewer GPUs."""
    unit = "GPU" if count == 1 else "GPUs"
    return pytest.mark.skipif(count > FOUND, reason=f"needs {count} {unit}, {FOUND} found")
