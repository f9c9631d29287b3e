"""The Ray cluster of a run: joined, or started on this machine, and checked for size.

Ray and torch are imported where they are used: whether a run fits this machine is checked before
anything that takes seconds to import.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

MOST_TO_A_CORE = 4
"""Ranks that may share a core of this machine."""

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""One of them is there where NVIDIA's driver is, the second under WSL."""

_logger = logging.getLogger(__name__)


def check_local_size(config: TrainConfig) -> None:
    """Raise `ValueError` where the layout needs more than this machine has."""
    check_size(config, num_cores=os.cpu_count() or 1, num_gpus=num_local_gpus())


def num_local_gpus() -> int:
    """Number of this machine's GPUs that torch can use, without those that are hidden from it."""
    if not any(Path(name).exists() for name in DRIVER_FILES):
        return 0
    import torch

    # As NVML counts, without a CUDA context; not those that CUDA_VISIBLE_DEVICES hides.
    return torch.cuda.device_count()


def check_size(config: TrainConfig, *, num_cores: int, num_gpus: int) -> None:
    """Raise `ValueError` where the layout needs more than there is.

    On GPUs every rank, of policy, engines, critic and reward model, has one of its own, but for
    engines with `cluster.colocated`, which are on the policy's. On CPUs
    they take turns, and a few may share a core: a warning where the largest group has more ranks
    than cores.
    A cluster that was joined must have a core for each actor, or Ray would wait for one for ever.
    """
    layout = config.parallel
    policy_ranks = layout.num_ranks
    engine_ranks = config.cluster.num_engines * config.engine.tensor
    others = _others(config)
    other_ranks = policy_ranks * len(others)
    shape = (
        f"parallel.tensor={layout.tensor} x parallel.pipeline={layout.pipeline} x "
        f"parallel.data={layout.data} = {policy_ranks} policy ranks, cluster.num_engines="
        f"{config.cluster.num_engines} x engine.tensor={config.engine.tensor} = "
        f"{engine_ranks} engine ranks"
    )
    for other in others:
        shape += f", and {policy_ranks} ranks of the {other}, which is cut as the policy is"
    if num_gpus:
        own = 0 if config.cluster.colocated else engine_ranks
        num_needed = policy_ranks + own + other_ranks
        if num_needed > num_gpus:
            raise ValueError(
                f"{shape}: {num_needed} GPUs needed, the cluster has {num_gpus}; "
                "lower one of these (parallel=single makes one policy rank) or join a larger "
                "cluster (cluster.address)"
            )
        return
    num_actors = policy_ranks + config.cluster.num_engines + other_ranks
    if config.cluster.address and num_actors > num_cores:
        raise ValueError(
            f"{shape}: {num_actors} actors, an engine is one, need a core each, and the cluster "
            f"has {num_cores}; lower one of these or join a larger cluster (cluster.address)"
        )
    most = max(policy_ranks, engine_ranks)
    if most > MOST_TO_A_CORE * num_cores:
        raise ValueError(
            f"{shape}: more ranks than {MOST_TO_A_CORE} to each of the {num_cores} cores here; "
            "expected fewer, on a CPU they are for trying things out; probable cause: a layout "
            "that was made for a cluster (cluster.address)"
        )
    if most > num_cores:
        _logger.warning("%s: they share %d cores, which is slow", shape, num_cores)


def check_build(num_gpus: int, cuda: str | None) -> None:
    """Raise `ValueError` for a cluster with GPUs and a torch without CUDA. cuda: its version."""
    if num_gpus and cuda is None:
        import torch

        raise ValueError(
            f"cluster.address: the cluster has {num_gpus} GPUs, and torch {torch.__version__} is a "
            "build for CPUs; expected one with CUDA (make env DEVICE=gpu), or a cluster without "
            "GPUs (ray start --num-gpus=0); probable cause: an environment made on a login node"
        )


def connect(config: TrainConfig) -> bool:
    """Join or start the cluster; True where it has GPUs.

    A cluster that is started here has the GPUs that this environment's torch can use; that the
    layout fits them was checked before (`check_local_size`). Raises `ValueError` when it does not
    fit a joined cluster, and where that has GPUs that this environment cannot use.
    """
    import ray
    import torch

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["RAY_DEDUP_LOGS"] = "0"
    at_sigterm = signal.getsignal(signal.SIGTERM)
    num_cores = os.cpu_count() or 1
    if config.cluster.address:
        ray.init(address=config.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    else:
        ranks = config.parallel.num_ranks + config.cluster.num_engines
        ranks += config.parallel.num_ranks * len(_others(config))
        ray.init(
            num_cpus=max(num_cores, ranks),
            num_gpus=num_local_gpus(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=512 * 1024**2,
        )
    # Ray puts a handler of its own in its place, which ends the process at once.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, at_sigterm)
    resources = ray.cluster_resources()
    num_gpus = int(resources.get("GPU", 0))
    if config.cluster.address:
        check_build(num_gpus, torch.version.cuda)
        check_size(config, num_cores=int(resources.get("CPU", 0)), num_gpus=num_gpus)
    return num_gpus > 0


def _others(config: TrainConfig) -> list[str]:
    """Models that are cut as the policy is and have as many ranks."""
    there = {
        "reward model": config.reward.serves_model,
        "critic": config.algo.needs_critic and not config.validates_only,
    }
    return [name for name, is_there in there.items() if is_there]
