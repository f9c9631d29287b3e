"""A real Slurm on this host: munge, a controller and the daemons of two virtual nodes.

Munge and the controller run on the host, the daemons in the namespaces of their nodes
(`node_namespaces`). An installed Slurm of the system is not touched: `SLURM_CONF` selects this one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.runtime.free_port import free_ports
from tests.slurm import node_namespaces
from tests.slurm.node_namespaces import SEARCH_PATH, NodeNetwork, child_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NODES = ("n1", "n2")
CPUS_PER_NODE = 3
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")
CONFIG = """\
ClusterName=virtual
SlurmctldHost={host}({host_address})
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/slurmd.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
JobCompType=jobcomp/none
FirstJobId={first_job}
SchedulerParameters=defer,sched_min_interval=100000,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=15
SlurmdTimeout=120
MessageTimeout=60
NodeName=DEFAULT CPUs={cpus} CoresPerSocket={cpus} State=UNKNOWN
NodeName=n1 NodeHostname=n1 NodeAddr={address_1} Port={port_1}
NodeName=n2 NodeHostname=n2 NodeAddr={address_2} Port={port_2}
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def unavailable_reason() -> str:
    """Return why Slurm cannot run here; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: slurm-wlm and munge)"
    if os.geteuid() != 0:
        return "Slurm's daemons start jobs as their users and need root"
    return node_namespaces.unavailable_reason()


def live_processes(marker: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield pid, name, command and environment of processes with `marker` in the environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, command, environment = (
                (folder / part).read_bytes().replace(b"\0", b" ").decode(errors="replace")
                for part in ("comm", "cmdline", "environ")
            )
        except OSError:
            continue
        if marker in environment:
            yield int(folder.name), name.strip(), command, environment


class VirtualCluster:
    """A Slurm cluster from `start` to `close`; `command` runs Slurm's programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        """Processes by name; of a node's daemon, `nsenter`, whose child the daemon is."""
        self._network = NodeNetwork(NODES, folder)
        path = os.pathsep.join([str(Path(sys.executable).parent), SEARCH_PATH])
        inherited = {
            name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ
        }
        self.environment = {**inherited, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start nodes and daemons; return when both nodes accept jobs."""
        self._network.start()
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        controller_port, port_1, port_2 = free_ports(3)
        text = CONFIG.format(
            host=socket.gethostname().split(".")[0],
            folder=self.folder,
            first_job=os.getpid(),  # job ids differ between clusters on one host
            host_address=self._network.host_address,
            cpus=CPUS_PER_NODE,
            address_1=self._network.addresses["n1"],
            address_2=self._network.addresses["n2"],
            controller_port=controller_port,
            port_1=port_1,
            port_2=port_2,
        )
        (self.folder / "slurm.conf").write_text(text, encoding="utf-8")
        names = {"key-file": "key", "socket": "sock", "pid-file": "pid", "seed-file": "seed"}
        # --force, because munged rejects a private folder.
        files = [f"--{option}={self.folder}/munge.{end}" for option, end in names.items()]
        self._spawn("munged", "--foreground", "--force", *files)
        self.wait_for(lambda: (self.folder / "munge.sock").exists(), 120, "munged's socket")
        self._spawn("slurmctld", "-D", "-c", "-f", f"{self.folder}/slurm.conf")
        for node in NODES:
            self.start_node(node)
        self.wait_for(lambda: self.node_states() == ["idle"] * len(NODES), 240, "idle nodes")

    def start_node(self, node: str) -> None:
        """Start the daemon of one node."""
        arguments = ("-D", "-N", node, "-f", f"{self.folder}/slurm.conf")
        self._spawn("slurmd", *arguments, name=node, prefix=self._network.enter(node))

    def node_pid(self, node: str) -> int:
        """Return the process id of a node's daemon, as this host sees it."""
        return child_of(self.daemons[node].pid)

    def node_states(self) -> list[str]:
        """Return `idle`, `alloc`, `down*`, ... for each node."""
        completed = self.command("sinfo", "-h", "-N", "-o", "%t", check=False)
        return completed.stdout.split()

    def _spawn(
        self, program: str, *arguments: str, name: str = "", prefix: Sequence[str] = ()
    ) -> None:
        name = name or program
        log = (self.folder / f"{name}.log").open("ab")
        found = shutil.which(program, path=SEARCH_PATH)
        assert found is not None, program
        self.daemons[name] = subprocess.Popen(
            [*prefix, found, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()

    def command(
        self, *words: str, check: bool = True, timeout_s: float = 240, **more: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a Slurm command; `more` goes to `subprocess.run`."""
        completed = subprocess.run(
            words,
            **{"env": self.environment, **more},
            text=True,
            capture_output=True,
            timeout=timeout_s,
        )
        if check and completed.returncode:
            raise RuntimeError(f"{' '.join(words)}: {completed.stderr}\n{self.logs()}")
        return completed

    def state(self, job: str) -> str:
        """Return `RUNNING`, `COMPLETED`, ...; empty when Slurm has dropped the job."""
        text = self.command("scontrol", "show", "job", job, check=False).stdout
        found = re.search(r"JobState=(\w+)", text)
        return found.group(1) if found else ""

    def exit_code(self, job: str) -> int:
        """Return the exit code of a job's batch script."""
        text = self.command("scontrol", "show", "job", job).stdout
        found = re.search(r"ExitCode=(\d+):(\d+)", text)
        assert found is not None, text
        return int(found.group(1))

    def wait_for(self, condition: object, timeout_s: float, what: str, log: Path | None = None):
        """Wait until `condition()` holds; return the seconds, raise with the logs on timeout."""
        start_s = time.monotonic()
        while not condition():
            ended = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() - start_s > timeout_s:
                output = log.read_text(encoding="utf-8")[-3000:] if log and log.exists() else ""
                dead = f"; ended by itself: {', '.join(ended)}" if ended else ""
                raise TimeoutError(
                    f"{what}: not within {timeout_s} s{dead}\n{output}\n{self.logs()}"
                )
            time.sleep(0.2)
        return time.monotonic() - start_s

    def wait_ended(self, job: str, timeout_s: float, log: Path | None = None) -> int:
        """Wait for the end of a job; return its exit code."""
        self.wait_for(lambda: self.state(job) in ENDED, timeout_s, f"end of job {job}", log)
        return self.exit_code(job)

    def logs(self) -> str:
        """Return the last log lines of every daemon."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            parts.append("\n".join([f"-- {path.name}", *lines]))
        return "\n".join(parts)

    def stop_daemon(self, name: str, sign: int = signal.SIGTERM) -> None:
        """End one daemon."""
        pid = self.node_pid(name) if name in NODES else self.daemons[name].pid
        daemon = self.daemons.pop(name)
        os.kill(pid, sign)
        try:
            daemon.wait(timeout=300)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(timeout=300)

    def close(self) -> None:
        """End every job, then every daemon."""
        if "slurmctld" in self.daemons:
            self.command("scancel", "--user=root", check=False)
            deadline_s = time.monotonic() + 300
            while time.monotonic() < deadline_s:
                if not self.command("squeue", "-h", check=False).stdout.strip():
                    break
                time.sleep(0.5)
        for name in reversed(list(self.daemons)):
            self.stop_daemon(name)
        self._network.close()
