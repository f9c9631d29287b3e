"""A network of virtual nodes on this host, each with namespaces of its own.

A node has its own host name, addresses and interfaces, processes, /etc/hosts and /dev/shm; files
are shared, as on a cluster's file system. As on Debian, a node's own name resolves to 127.0.1.1,
which reaches no other node. A bridge on the host connects the nodes with each other and the host.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("ip", "unshare", "nsenter", "mount", "hostname")
NAMESPACES = ("--net", "--uts", "--mount", "--pid")
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])
START_S = 120

# Process 1 of a node: it ends with the node, and collects the processes whose parents have ended.
INIT = """\
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs shm /dev/shm && ip link set lo up &&
touch "$3" && while true; do sleep 60 & wait $!; done
"""


def unavailable_reason() -> str:
    """Return why there can be no virtual nodes here; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux, hostname)"
    link = ["ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"]
    completed = run("unshare", *NAMESPACES, "--fork", "--mount-proc", *link, check=False)
    if completed.returncode:
        return f"no namespaces with a network: {completed.stderr.strip()}"
    return ""


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program of the system."""
    environment = {"PATH": SEARCH_PATH}
    completed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300
    )
    if check and completed.returncode:
        raise RuntimeError(f"{' '.join(command)}: {completed.stderr}")
    return completed


class NodeNetwork:
    """Virtual nodes and the bridge between them, from `start` to `close`."""

    def __init__(self, names: tuple[str, ...], folder: Path) -> None:
        """Choose the addresses; several networks on one host have different ones."""
        self._folder = folder
        self._tag = f"v{os.getpid() % 10**6}"  # names of interfaces have at most 15 characters
        # 198.18.0.0/15 is reserved for tests of networks.
        self._subnet = f"198.18.{os.getpid() % 256}"
        self.host_address = f"{self._subnet}.254"
        self.addresses = {name: f"{self._subnet}.{index}" for index, name in enumerate(names, 1)}
        self._init_processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Create the bridge and all nodes."""
        bridge = f"{self._tag}br"
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "address", "add", f"{self.host_address}/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for name in self.addresses:
            self._start_node(name)

    def _start_node(self, name: str) -> None:
        hosts = self._folder / f"{name}.hosts"
        others = [f"{self.addresses[peer]} {peer}" for peer in self.addresses if peer != name]
        host = f"{self.host_address} {socket.gethostname()}"
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {name}", *others, host, ""]
        hosts.write_text("\n".join(lines), encoding="utf-8")
        ready = self._folder / f"{name}.ready"
        options = [*NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen(
            ["unshare", *options, "bash", "-c", INIT, "init", name, str(hosts), str(ready)],
            env={"PATH": SEARCH_PATH},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._init_processes[name] = process
        deadline_s = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"node {name} did not start within {START_S} s")
            time.sleep(0.05)
        outside = f"{self._tag}{name}"
        init = str(child_of(process.pid))
        peer = ["peer", "name", "eth0", "netns", init]
        run("ip", "link", "add", outside, "master", f"{self._tag}br", "type", "veth", *peer)
        run("ip", "link", "set", outside, "up")
        for words in (
            ("address", "add", f"{self.addresses[name]}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", self.host_address),
        ):
            run(*self.enter(name), "ip", *words)

    def enter(self, name: str) -> list[str]:
        """Return the command that runs a program on a node."""
        return ["nsenter", f"--target={child_of(self._init_processes[name].pid)}", *NAMESPACES]

    def close(self) -> None:
        """End the nodes with all their processes, and remove the bridge."""
        for process in self._init_processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=120)
        run("ip", "link", "delete", f"{self._tag}br", check=False)


def child_of(pid: int) -> int:
    """Return the only child of a process that has forked, such as `unshare` or `nsenter`."""
    deadline_s = time.monotonic() + START_S
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"process {pid} has no child")
        time.sleep(0.05)
    (child,) = children
    return int(child)
