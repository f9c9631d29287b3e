"""Join or start the Ray cluster of a run and check that the parallel layout fits it.

Ray and torch are imported inside the functions, so that the check against this machine runs before
any slow import.
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

MAX_RANKS_PER_CORE = 4
"""Maximum number of ranks per CPU core of this machine."""

NVIDIA_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of NVIDIA's driver, on Linux and on WSL."""

_logger = logging.getLogger(__name__)


def check_local_size(config: TrainConfig) -> None:
    """Raise `ValueError` if the layout needs more than this machine has."""
    check_cluster_size(config, num_cores=os.cpu_count() or 1, num_gpus=num_local_gpus())


def num_local_gpus() -> int:
    """Return the number of this machine's GPUs that torch can use."""
    if not any(Path(name).exists() for name in NVIDIA_DEVICE_FILES):
        return 0
    import torch

    # Counts with NVML, without creating a CUDA context; respects CUDA_VISIBLE_DEVICES.
    return torch.cuda.device_count()


def check_cluster_size(config: TrainConfig, *, num_cores: int, num_gpus: int) -> None:
    """Raise `ValueError` if the layout needs more cores or GPUs than there are.

    On GPUs, every rank of policy, engines, critic and reward model needs its own GPU, except that
    with `cluster.colocated` the engines use the policy's. On CPUs the models take turns, and up to
    `MAX_RANKS_PER_CORE` ranks may share a core, with a warning. A joined cluster must have one core
    per actor, because Ray would wait for a missing core forever.
    """
    layout = config.parallel
    policy_ranks = layout.world_size
    engine_ranks = config.cluster.num_engines * config.engine.tensor_parallel_size
    others = _auxiliary_models(config)
    other_ranks = policy_ranks * len(others)
    layout_text = (
        f"parallel.tensor={layout.tensor} x parallel.pipeline={layout.pipeline} x "
        f"parallel.data={layout.data} = {policy_ranks} policy ranks, cluster.num_engines="
        f"{config.cluster.num_engines} x engine.tensor_parallel_size="
        f"{config.engine.tensor_parallel_size} = {engine_ranks} engine ranks"
    )
    for other in others:
        layout_text += f", and {policy_ranks} ranks of the {other}, which has the policy's layout"
    if num_gpus:
        own_engine_ranks = 0 if config.cluster.colocated else engine_ranks
        num_needed = policy_ranks + own_engine_ranks + other_ranks
        if num_needed > num_gpus:
            raise ValueError(
                f"{layout_text}: {num_needed} GPUs needed, the cluster has {num_gpus}; "
                "lower one of these (parallel=single makes one policy rank) or join a larger "
                "cluster (cluster.ray_address)"
            )
        return
    num_actors = policy_ranks + config.cluster.num_engines + other_ranks
    if config.cluster.ray_address and num_actors > num_cores:
        raise ValueError(
            f"{layout_text}: {num_actors} actors (an engine is one) need a core each, and the "
            f"cluster has {num_cores}; lower one of these or join a larger cluster "
            "(cluster.ray_address)"
        )
    max_ranks = max(policy_ranks, engine_ranks)
    if max_ranks > MAX_RANKS_PER_CORE * num_cores:
        raise ValueError(
            f"{layout_text}: more ranks than {MAX_RANKS_PER_CORE} to each of the {num_cores} cores "
            "here; expected fewer, as runs on CPUs are for trying things out; probable cause: a "
            "layout that was made for a cluster (cluster.ray_address)"
        )
    if max_ranks > num_cores:
        _logger.warning("%s: they share %d cores, which is slow", layout_text, num_cores)


def check_torch_build(num_gpus: int, cuda: str | None) -> None:
    """Raise `ValueError` if the cluster has GPUs but torch is a CPU build.

    Args:
        num_gpus: Number of GPUs in the cluster.
        cuda: `torch.version.cuda`; None for a CPU build.
    """
    if num_gpus and cuda is None:
        import torch

        raise ValueError(
            f"cluster.ray_address: the cluster has {num_gpus} GPUs, and torch "
            f"{torch.__version__} is a build for CPUs; expected one with CUDA (make env "
            "DEVICE=gpu), or a cluster without GPUs (ray start --num-gpus=0); probable cause: "
            "an environment made on a login node"
        )


def set_ray_environment() -> None:
    """Set the variables that Ray's processes on this machine read when they start.

    Ray would start ranks and engines with niceness 15, so that the code that tools run, which has
    niceness 0, and every other program on the machine would take most of a core from them.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ["RAY_DEDUP_LOGS"] = "0"


def connect(config: TrainConfig) -> bool:
    """Join or start the Ray cluster and return whether it has GPUs.

    A local cluster gets the GPUs that torch can use here; `check_local_size` has already checked
    that the layout fits them.

    Raises:
        ValueError: The layout does not fit the joined cluster, or this environment cannot use its
            GPUs.
    """
    import ray
    import torch

    set_ray_environment()
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    num_cores = os.cpu_count() or 1
    if config.cluster.ray_address:
        ray.init(
            address=config.cluster.ray_address, log_to_driver=False, logging_level=logging.ERROR
        )
    else:
        ranks = config.parallel.world_size + config.cluster.num_engines
        ranks += config.parallel.world_size * len(_auxiliary_models(config))
        ray.init(
            num_cpus=max(num_cores, ranks),
            num_gpus=num_local_gpus(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=512 * 1024**2,
        )
    # Restore the handler: Ray's own ends the process at once.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, sigterm_handler)
    resources = ray.cluster_resources()
    num_gpus = int(resources.get("GPU", 0))
    if config.cluster.ray_address:
        check_torch_build(num_gpus, torch.version.cuda)
        check_cluster_size(config, num_cores=int(resources.get("CPU", 0)), num_gpus=num_gpus)
    return num_gpus > 0


def _auxiliary_models(config: TrainConfig) -> list[str]:
    """Return the names of the models besides the policy, which have its parallel layout."""
    is_used_by_name = {
        "reward model": config.reward.hosts_reward_model,
        "critic": config.algo.needs_critic and not config.is_eval_only,
    }
    return [name for name, is_used in is_used_by_name.items() if is_used]
