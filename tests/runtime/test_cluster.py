"""Checks that a parallel layout fits the cores and GPUs."""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.policy import ParallelConfig
from mega_agentrl.config.sections.reward import RewardConfig, RewardModelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig, EngineConfig
from mega_agentrl.errors import InputError
from mega_agentrl.runtime import cluster, ray_compat
from mega_agentrl.runtime.cluster import (
    ClusterConnection,
    check_cluster_size,
    check_local_size,
    check_torch_build,
)

TWO_RANKS = ParallelConfig(tensor=2)
CRITIC = AlgoConfig(advantage="gae")
JUDGE = RewardConfig(rubric={"default": {"model": 1.0}}, model=RewardModelConfig("folder"))


def cluster_config(parallel=TWO_RANKS, **sections):
    return TrainConfig(parallel=parallel, **sections)


def too_small(config, **size):
    """Return what a cluster of this size has too few of, and how many."""
    with pytest.raises(InputError) as caught:
        check_cluster_size(config, **size)
    return caught.value.name, caught.value.got


def test_policy_and_engine_share_cpu_cores():
    check_cluster_size(cluster_config(), num_cores=2, num_gpus=0)


def test_more_ranks_than_cores_warn_or_fail(caplog, capsys):
    wide = cluster_config(ParallelConfig(tensor=2, pipeline=2))
    check_cluster_size(wide, num_cores=2, num_gpus=0)
    for text in (caplog.text, capsys.readouterr().err):
        assert "4 policy ranks" in text and "5 processes share 2 cores" in text
    check_cluster_size(cluster_config(ParallelConfig(data=8)), num_cores=2, num_gpus=0)
    nine = cluster_config(ParallelConfig(data=9))
    assert too_small(nine, num_cores=2, num_gpus=0) == ("cores of this machine", 2)
    wide.cluster.ray_address = "auto"
    assert too_small(wide, num_cores=4, num_gpus=0) == ("cores of the cluster", 4)
    check_cluster_size(wide, num_cores=5, num_gpus=0)


@pytest.mark.parametrize(
    ("sections", "num_gpus"),
    [
        ({"engine": EngineConfig(tensor_parallel_size=2)}, 4),
        ({"engine": EngineConfig(tensor_parallel_size=2), "cluster": {"colocated": True}}, 2),
        ({"algo": CRITIC}, 5),
        ({"algo": CRITIC, "total_steps": 0}, 3),
        ({"algo": CRITIC, "cluster": {"colocated_models": True}}, 3),
        ({"reward": JUDGE}, 5),
    ],
    ids=["engine", "colocated", "critic", "evaluation", "shared_critic", "reward_model"],
)
def test_every_rank_needs_a_gpu_except_those_that_share_the_policys(sections, num_gpus):
    made = cluster_config(**sections | {"cluster": ClusterConfig(**sections.get("cluster", {}))})
    check_cluster_size(made, num_cores=2, num_gpus=num_gpus)
    missing = too_small(made, num_cores=64, num_gpus=num_gpus - 1)
    assert missing == ("GPUs of the cluster", num_gpus - 1)


def test_gpus_hidden_from_torch_do_not_count(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(cluster, "NVIDIA_DEVICE_FILES", (os.devnull,))
    with pytest.raises(InputError) as caught:
        check_local_size(cluster_config())
    assert (caught.value.name, caught.value.got) == ("GPUs of the cluster", 2)
    monkeypatch.setattr(cluster, "NVIDIA_DEVICE_FILES", ("/dev/no_driver",))
    check_local_size(cluster_config())


def test_gpu_cluster_needs_a_cuda_build_of_torch():
    check_torch_build(8, "13.0")
    check_torch_build(0, None)
    with pytest.raises(InputError) as caught:
        check_torch_build(8, None)
    assert caught.value.name == "torch"


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1 in the kernel's tables of IPv4 and IPv6 sockets."""
LISTENER = """
import sys
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.runtime.cluster import ClusterConnection

with ClusterConnection(TrainConfig()) as cluster:
    cluster.begin()
    assert cluster.wait() is False
    import ray

    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


STRANGER = """
import sys
from ray._raylet import GcsClient

try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=200)
except Exception as error:
    print(type(error).__name__, error)
"""
"""Another user of the machine, who has no token."""


def listening_hosts(pids):
    """Addresses that these processes accept TCP connections on, as the kernel prints them."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
    hosts = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                hosts.add(fields[1].split(":")[0])
    return hosts


@pytest.mark.extended
def test_a_cluster_of_ones_own_is_closed_to_other_machines_and_ends_with_the_run():
    """Ray asks for no password: whoever reaches it may run code as its user."""
    child = subprocess.Popen(
        [sys.executable, "-c", LISTENER],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"RAY_ADDRESS": "127.0.0.1:9"},  # another user's cluster is not joined
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = child.stdout.readline().strip()
        assert address.startswith("127.0.0.1:")
        members = psutil.Process(child.pid).children(recursive=True)
        hosts = listening_hosts([child.pid, *(member.pid for member in members)])
        assert len(members) >= 2 and hosts and hosts <= LOOPBACK
        stranger = subprocess.run(
            [sys.executable, "-c", STRANGER, address],
            env={name: value for name, value in os.environ.items() if "RAY_AUTH" not in name},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert stranger.stdout.startswith("AuthenticationError")
        child.communicate("end", timeout=300)
        assert child.returncode == 0
        _, alive = psutil.wait_procs(members, timeout=300)
        assert not alive
    finally:
        child.kill()
        child.wait()


def test_the_reason_for_a_failed_connection_is_raised_where_the_cluster_is_needed(monkeypatch):
    error = InputError("cluster.ray_address", "nowhere", "a cluster")

    def fail(config):
        raise error

    monkeypatch.setattr(cluster, "_connect", fail)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # other tests use this process's Ray
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with ClusterConnection(cluster_config()) as connection:
        connection.begin()
        for _ in range(2):
            with pytest.raises(InputError) as caught:
                connection.wait()
            assert caught.value is error
    assert "ray-cluster" not in {thread.name for thread in threading.enumerate()}


def test_servers_of_ray_that_do_not_come_up_are_an_error_of_the_run(monkeypatch):
    def fail(config):
        raise Exception("The current node timed out\nduring startup.")  # noqa: TRY002 - as Ray

    monkeypatch.setattr(cluster, "_connect", fail)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # other tests use this process's Ray
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with ClusterConnection(cluster_config()) as connection:
        with pytest.raises(RuntimeError) as caught:
            connection.wait()
    assert "timed out during startup" in str(caught.value), "Ray's message reaches the user"


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_the_object_store_is_small_only_where_batches_are(monkeypatch, num_gpus):
    """512 MiB would spill the batches of a GPU machine; None is Ray's share of the memory."""
    settings = {}
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(ray, "init", lambda **given: settings.update(given))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(num_gpus)})
    monkeypatch.setattr(cluster, "num_local_gpus", lambda: num_gpus)
    assert cluster._connect(cluster_config()) is (num_gpus > 0)
    assert settings["num_gpus"] == num_gpus
    assert settings["object_store_memory"] == (None if num_gpus else 512 * 1024**2)


def test_ray_gets_more_time_to_start_than_its_own_limit(monkeypatch):
    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), {"node_name": "here"}])

    def get_node(address, node):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("ray._private.services.get_node", get_node)
    monkeypatch.setattr(ray_compat.time, "sleep", lambda _: None)
    with ray_compat.patient_ray_start():
        assert ray._private.services.get_node("here", "node") == {"node_name": "here"}
    assert ray._private.services.get_node is get_node


def test_a_raylet_gets_the_ports_of_its_agents_for_which_it_waits_only_15_s(monkeypatch, tmp_path):
    given = {}

    def start_raylet(
        node_id,
        session_dir,
        metrics_agent_port,
        metrics_export_port=None,
        runtime_env_agent_port=None,
        dashboard_agent_listen_port=52365,
    ):
        listen = dashboard_agent_listen_port
        given.update(
            ports={metrics_agent_port, metrics_export_port, runtime_env_agent_port, listen}
        )
        given.update(listen=listen)
        return SimpleNamespace(process=SimpleNamespace(poll=lambda: None))

    monkeypatch.setattr("ray._private.services.start_raylet", start_raylet)
    node_id = "ab" * 28
    with ray_compat.patient_ray_start():
        ray._private.services.start_raylet(node_id, str(tmp_path), metrics_agent_port=0)
    (port_file,) = tmp_path.iterdir()
    assert port_file.name == f"dashboard_agent_listen_port_{node_id}"
    assert int(port_file.read_text()) == given["listen"]
    assert len(given["ports"]) == 4
    for port in given["ports"]:
        with socket.socket() as probe:
            probe.bind(("", port))


def test_the_end_of_the_raylet_is_an_error_at_once(monkeypatch, tmp_path):
    def get_node(*_):
        raise RuntimeError("not yet")

    ended = SimpleNamespace(process=SimpleNamespace(poll=lambda: -6))
    monkeypatch.setattr("ray._private.services.get_node", get_node)
    monkeypatch.setattr(
        "ray._private.services.start_raylet", lambda node_id, session_dir, **_: ended
    )
    with ray_compat.patient_ray_start():
        ray._private.services.start_raylet("ab" * 28, str(tmp_path))
        with pytest.raises(ChildProcessError, match="raylet ended with exit code -6"):
            ray._private.services.get_node("here", "node")


def test_ray_does_not_replace_the_handler_of_sigterm():
    import ray._private.utils as ray_utils

    def replace(*_):
        pytest.fail("Ray's handler was called")

    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("own"))
    try:
        with ray_compat.keep_sigterm_handler():
            ray_utils.set_sigterm_handler(replace)
            # As Ray's library does, without asking Python.
            ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN))
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == ["own"]
        ray_utils.set_sigterm_handler(replace)
        assert signal.getsignal(signal.SIGTERM) is replace, "only while Ray starts"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_workers_have_the_priority_of_their_driver(ray_local):
    @ray.remote
    def niceness():
        return os.getpriority(os.PRIO_PROCESS, 0)

    assert ray.get(niceness.remote(), timeout=300) == os.getpriority(os.PRIO_PROCESS, 0)
