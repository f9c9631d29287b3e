"""Starts the policy on a machine where Ray's memory monitor kills every process.

    python memory_monitor_kills.py FOLDER

Prints the error; the lines of the driver's monitor go to stderr.
"""

import os
import sys
from pathlib import Path


def main(folder):
    # Ray reads them when it is imported.
    os.environ["RAY_memory_usage_threshold"] = "0.001"
    os.environ["RAY_memory_monitor_refresh_ms"] = "50"
    import ray

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.config.sections.runtime import ClusterConfig
    from mega_agentrl.runtime.driver_monitor import DriverMonitor
    from mega_agentrl.runtime.memory_watch import MemoryWatch
    from mega_agentrl.runtime.remote_calls import PolicyRankDiedError
    from mega_agentrl.runtime.workers.policy_group import PolicyGroup

    config = TrainConfig(cluster=ClusterConfig(call_timeout_s=200.0))
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    with DriverMonitor({}, MemoryWatch(folder, driver_pid=os.getpid())):
        group = PolicyGroup.launch(config, on_gpu=False, log_folder=folder)
        try:
            group.start()
        except PolicyRankDiedError as error:
            print(type(error).__name__, *error.processes)
        group.close()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
