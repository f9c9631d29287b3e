"""A Ray cluster of many nodes, whose GPUs exist in Ray's accounting only."""

from collections import Counter

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from mega_agentrl.runtime.workers.placement import Placement

STORE_BYTES = 80 * 1024**2


def gpus_used_by_node(configs, *, num_nodes, gpus_per_node):
    """Place each job alone on the cluster; return the GPUs that it takes, sorted, by node."""
    cluster = Cluster()
    for _ in range(num_nodes):
        cluster.add_node(
            num_cpus=gpus_per_node, num_gpus=gpus_per_node, object_store_memory=STORE_BYTES
        )
    ray.init(address=cluster.address, log_to_driver=False)
    used = []
    for config in configs:
        placement = Placement(config, on_gpu=True, with_engines=True)
        table = placement_group_table(placement._placement_group)
        placement.release()
        count = Counter()
        for index, node in table["bundles_to_node_id"].items():
            count[node] += int(table["bundles"][index]["GPU"])
        used.append(sorted(count.values()))
    ray.shutdown()
    cluster.shutdown()
    return used
