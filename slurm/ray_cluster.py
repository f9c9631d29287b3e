"""Chooses the head address of a job's Ray cluster, and watches its nodes.

`place JOB NODE...` prints host:port for a head on this host. The host is
`MEGA_AGENTRL_HEAD_ADDRESS`, else this host's address on the route to the other nodes, else Ray's
guess. The port and the next one are free, and differ between jobs that share a host.

`watch ADDRESS FILE DEADLINE_S NODE...` creates FILE once every node has joined, and then watches
for lost nodes. If nodes are missing at the deadline or are lost later, it exits with 69 and one
line on stderr that names them. It only queries the head's node table and joins no cluster.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ray import util
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import RayError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EXIT_NODE_LOST = 69
POLL_INTERVAL_S = 2.0
JOIN_INTERVAL_S = 1.0
REQUEST_TIMEOUT_S = 10.0
HEAD_TIMEOUT_S = 60.0  # for a busy head; a dead one is noticed when its Slurm step ends
FIRST_PORT = 20000
PORTS_PER_JOB = 10
NUM_JOBS = 1000


def address_towards(peers: Iterable[str]) -> str | None:
    """Return this host's address on the route to the first of `peers` that is another host."""
    for peer in peers:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((peer, 9))
                own_address = str(probe.getsockname()[0])
        except OSError:
            continue
        if not own_address.startswith("127.") and own_address != socket.gethostbyname(peer):
            return own_address
    return None


def find_port_pair(job: int) -> int:
    """Return a free port whose successor, which Ray's client server uses, is free as well.

    The search starts at a port that depends on the job.

    Raises:
        OSError: There are no two such ports up to 65535.
    """
    first = FIRST_PORT + job % NUM_JOBS * PORTS_PER_JOB
    for port in range(first, 65535, 2):
        if can_bind(port) and can_bind(port + 1):
            return port
    raise OSError(f"no two free ports from {first} to 65535 on {socket.gethostname()}")


def can_bind(port: int) -> bool:
    """Return whether the port is free on all addresses of this host."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def choose_head_address(job: int, nodes: Sequence[str]) -> str:
    """Return host:port of the head, on this host."""
    host = os.environ.get("MEGA_AGENTRL_HEAD_ADDRESS") or address_towards(nodes)
    return f"{host or util.get_node_ip_address()}:{find_port_pair(job)}"


class ClusterMembership:
    """Node table of the Ray head at `address` (host:port)."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._head_address = (host, int(port))
        self._client: GcsClient | None = None

    def alive_nodes(self) -> set[str] | None:
        """Return the names of the nodes in the cluster; None if the head does not answer."""
        try:
            # Ray's own client would wait 40 s for a missing head.
            with socket.create_connection(self._head_address, timeout=REQUEST_TIMEOUT_S):
                pass
            if self._client is None:
                self._client = GcsClient(address=f"{self._head_address[0]}:{self._head_address[1]}")
            nodes = self._client.get_all_node_info(
                timeout=REQUEST_TIMEOUT_S, state_filter=GcsNodeInfo.GcsNodeState.ALIVE
            )
        except (RayError, OSError):
            self._client = None  # a client does not reconnect to a restarted head
            return None
        return {info.node_name for info in nodes.values()}


def wait_for_nodes(
    membership: ClusterMembership, nodes: Sequence[str], deadline_s: float
) -> set[str]:
    """Wait until all nodes have joined; return the names of nodes missing at the deadline."""
    deadline = time.monotonic() + deadline_s
    while missing := set(nodes) - (membership.alive_nodes() or set()):
        if time.monotonic() > deadline:
            return missing
        time.sleep(JOIN_INTERVAL_S)
    return set()


def watch_nodes(membership: ClusterMembership, nodes: Sequence[str]) -> set[str]:
    """Wait until nodes are lost and return their names; all of them if the head is silent."""
    last_answer_s = time.monotonic()
    while True:
        time.sleep(POLL_INTERVAL_S)
        alive = membership.alive_nodes()
        if alive is not None:
            last_answer_s = time.monotonic()
            if missing := set(nodes) - alive:
                return missing
        elif time.monotonic() - last_answer_s > HEAD_TIMEOUT_S:
            return set(nodes)


def monitor_cluster(address: str, joined: Path, deadline_s: float, nodes: Sequence[str]) -> str:
    """Wait until a node is missing or lost; return one line about it."""
    membership = ClusterMembership(address)
    if missing := wait_for_nodes(membership, nodes, deadline_s):
        return (
            f"missing after {deadline_s:g} s: {format_nodes(missing)}; Ray did not join {address}. "
            "Probable cause: the node cannot connect to that address, or Ray is slow to start "
            "(see ray-<node>.log; slurm/preflight.sh tests the connection)"
        )
    joined.touch()
    missing = watch_nodes(membership, nodes)
    if missing == set(nodes):
        return f"Ray's head at {address} has not answered for {HEAD_TIMEOUT_S:g} s"
    return f"{format_nodes(missing)} went away: Ray's head no longer hears from it"


def format_nodes(nodes: Iterable[str]) -> str:
    """Return `node n1` or `node n1, n2`."""
    return f"node {', '.join(sorted(nodes))}"


def main(arguments: Sequence[str]) -> int:
    """Run the command line of the module docstring; return the exit code."""
    match arguments:
        case ["place", job, *nodes]:
            print(choose_head_address(int(job), nodes))
            return 0
        case ["watch", address, joined, deadline_s, *nodes]:
            message = monitor_cluster(address, Path(joined), float(deadline_s), nodes)
            print(f"slurm/train.sh: {message}", file=sys.stderr)
            return EXIT_NODE_LOST
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
