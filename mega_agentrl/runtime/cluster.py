"""The Ray cluster of a run: joined, or started on this machine, and checked for size."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

_logger = logging.getLogger(__name__)


def check_size(config: TrainConfig, *, num_cores: int, num_gpus: int) -> None:
    """Raise `ValueError` where the layout needs more than there is.

    On GPUs every rank, of policy, engines and reward model, has one of its own. On a CPU they
    take turns, so the largest of them must fit the cores of a cluster that was joined; on this
    machine ranks may share cores, and a warning says that it is slow.
    """
    layout = config.parallel
    policy_ranks = layout.num_ranks
    engine_ranks = config.cluster.num_engines * config.engine.tensor
    reward_ranks = policy_ranks if config.reward.serves_model else 0
    shape = (
        f"parallel.tensor={layout.tensor} x parallel.pipeline={layout.pipeline} x "
        f"parallel.data={layout.data} = {policy_ranks} policy ranks, cluster.num_engines="
        f"{config.cluster.num_engines} x engine.tensor={config.engine.tensor} = "
        f"{engine_ranks} engine ranks"
    )
    if reward_ranks:
        shape += f", and {reward_ranks} ranks of the reward model, which is cut as the policy is"
    if num_gpus:
        num_needed = policy_ranks + engine_ranks + reward_ranks
        if num_needed > num_gpus:
            raise ValueError(
                f"{shape}: {num_needed} GPUs needed, the cluster has {num_gpus}; "
                "lower one of these or join a larger cluster (cluster.address)"
            )
    elif max(policy_ranks, engine_ranks) > num_cores:
        if config.cluster.address:
            raise ValueError(
                f"{shape}: more ranks than the {num_cores} cores of the cluster; lower one of "
                "these or join a larger cluster (cluster.address)"
            )
        _logger.warning("%s: they share %d cores, which is slow", shape, num_cores)


def connect(config: TrainConfig) -> bool:
    """Join or start the cluster; True where it has GPUs.

    Raises `ValueError` when the layout does not fit it.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["RAY_DEDUP_LOGS"] = "0"
    num_cores = os.cpu_count() or 1
    if config.cluster.address:
        ray.init(address=config.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    else:
        check_size(config, num_cores=num_cores, num_gpus=_local_gpus())
        ranks = config.parallel.num_ranks + config.cluster.num_engines
        ranks += config.parallel.num_ranks if config.reward.serves_model else 0
        ray.init(
            num_cpus=max(num_cores, ranks),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=512 * 1024**2,
        )
    resources = ray.cluster_resources()
    num_gpus = int(resources.get("GPU", 0))
    if config.cluster.address:
        check_size(config, num_cores=int(resources.get("CPU", 0)), num_gpus=num_gpus)
    return num_gpus > 0


def _local_gpus() -> int:
    """GPUs of this machine, without making a CUDA context."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
