"""The nodes of a job's Ray cluster: where the head is, whether all have joined, who went away.

`place JOB NODE...` prints host:port for the head, on the host this runs on. The host is
`MEGA_AGENTRL_HEAD_ADDRESS`, else the address this host shows to the other nodes, else Ray's guess.
The port is free, as is the next one, and differs between jobs that share a host.

`watch ADDRESS FILE DEADLINE_S NODE...` makes FILE once every node has joined, and goes on looking;
ends with 69 and one line on stderr that names the nodes when the deadline passes before, or when
one goes away later. It asks the head's directory only, and joins no cluster.
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

LOST = 69
PERIOD_S = 2.0
ANSWER_S = 10.0
SILENCE_S = 60.0  # a busy head may be slow for a while; that it is gone is seen by its step's end
FIRST_PORT = 20000
PORTS_PER_JOB = 10
NUM_JOBS = 1000


def address_towards(peers: Iterable[str]) -> str | None:
    """This host's address on the way to the first of `peers` that resolves and is elsewhere."""
    for peer in peers:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((peer, 9))
                own = str(probe.getsockname()[0])
        except OSError:
            continue
        if not own.startswith("127.") and own != socket.gethostbyname(peer):
            return own
    return None


def free_ports(job: int) -> int:
    """A port nobody listens on, nor on the next one; the job's own where those are free.

    The next one is for Ray's client server, which `ray start --head` always brings along. Raises
    `OSError` where there are no two such ports up to 65535.
    """
    first = FIRST_PORT + job % NUM_JOBS * PORTS_PER_JOB
    for port in range(first, 65535, 2):
        if can_bind(port) and can_bind(port + 1):
            return port
    raise OSError(f"no two free ports from {first} to 65535 on {socket.gethostname()}")


def can_bind(port: int) -> bool:
    """Whether nobody has the port on any address of this host."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def place(job: int, nodes: Sequence[str]) -> str:
    """host:port of the head, on this host."""
    host = os.environ.get("MEGA_AGENTRL_HEAD_ADDRESS") or address_towards(nodes)
    return f"{host or util.get_node_ip_address()}:{free_ports(job)}"


class Directory:
    """What the head knows about the cluster's nodes. Asked at `address`, host:port."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host, int(port))
        self._client: GcsClient | None = None

    def alive(self) -> set[str] | None:
        """Names of the nodes that are in the cluster; None where the head does not answer."""
        try:
            # Ray's own client would wait 40 s for a head that is not there.
            with socket.create_connection(self._place, timeout=ANSWER_S):
                pass
            if self._client is None:
                self._client = GcsClient(address=f"{self._place[0]}:{self._place[1]}")
            nodes = self._client.get_all_node_info(
                timeout=ANSWER_S, state_filter=GcsNodeInfo.GcsNodeState.ALIVE
            )
        except (RayError, OSError):
            self._client = None  # it would not know a head that was started again
            return None
        return {info.node_name for info in nodes.values()}


def wait(directory: Directory, nodes: Sequence[str], deadline_s: float) -> set[str]:
    """Names of the nodes still missing at the deadline; empty as soon as none is."""
    end_s = time.monotonic() + deadline_s
    while missing := set(nodes) - (directory.alive() or set()):
        if time.monotonic() > end_s:
            return missing
        time.sleep(1.0)
    return set()


def watch(directory: Directory, nodes: Sequence[str]) -> set[str]:
    """Names of the nodes that have gone away; all of them where the head has fallen silent."""
    heard_s = time.monotonic()
    while True:
        time.sleep(PERIOD_S)
        alive = directory.alive()
        if alive is not None:
            heard_s = time.monotonic()
            if missing := set(nodes) - alive:
                return missing
        elif time.monotonic() - heard_s > SILENCE_S:
            return set(nodes)


def follow(address: str, joined: Path, deadline_s: float, nodes: Sequence[str]) -> str:
    """One line on what went wrong; returns only then."""
    directory = Directory(address)
    if missing := wait(directory, nodes, deadline_s):
        return (
            f"missing after {deadline_s:g} s: {named(missing)}; Ray there did not join {address}. "
            "Probable cause: that address cannot be reached from there, or Ray is slow to start "
            "(its ray-<node>.log; slurm/preflight.sh tests the way)"
        )
    joined.touch()
    missing = watch(directory, nodes)
    if missing == set(nodes):
        return f"Ray's head at {address} has not answered for {SILENCE_S:g} s"
    return f"{named(missing)} went away: Ray's head no longer hears from it"


def named(nodes: Iterable[str]) -> str:
    """`node n1`, `node n1, n2`."""
    return f"node {', '.join(sorted(nodes))}"


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    match arguments:
        case ["place", job, *nodes]:
            print(place(int(job), nodes))
            return 0
        case ["watch", address, joined, deadline_s, *nodes]:
            line = follow(address, Path(joined), float(deadline_s), nodes)
            print(f"slurm/train.sh: {line}", file=sys.stderr)
            return LOST
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
