"""Placement of hosts, by hand and as a property; a missing resource; a lost node."""

import asyncio
import time
from collections import Counter

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster

from mega_agentrl.config.sections.tools import PythonToolConfig
from mega_agentrl.runtime.ray_compat import patient_ray_start
from mega_agentrl.runtime.sandboxes import host_supervisor as module
from mega_agentrl.runtime.sandboxes.host_supervisor import (
    HostStartError,
    HostSupervisor,
    choose_node,
)
from mega_agentrl.sandbox.client import SandboxLostError

RESOURCE = module.SANDBOX_HOST_RESOURCE


def node(name, amount=0.0, *, alive=True):
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": 4.0, RESOURCE: amount}}


def test_hosts_spread_over_the_nodes_with_room():
    nodes = [node("a", 2.0), node("b", 1.0), node("c"), node("d", 4.0, alive=False)]
    num_hosts_by_node = Counter()
    chosen = []
    for _ in range(4):
        chosen.append(choose_node(nodes, RESOURCE, num_hosts_by_node))
        num_hosts_by_node[chosen[-1]] += 1
    assert chosen == ["a", "b", "a", None]
    assert choose_node(nodes, "", {"a": 1, "b": 1}) == "c"
    assert choose_node([node("a", 0.5)], RESOURCE, {}) is None
    assert choose_node([], "", {}) is None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 12))
def test_hosts_use_exactly_the_offered_resources(amounts, num_hosts):
    nodes = [node(str(i), float(amount)) for i, amount in enumerate(amounts)]
    num_hosts_by_node = Counter()
    for _ in range(num_hosts):
        if (chosen := choose_node(nodes, RESOURCE, num_hosts_by_node)) is not None:
            num_hosts_by_node[chosen] += 1
    assert num_hosts_by_node.total() == min(num_hosts, sum(amounts))
    assert all(num_hosts_by_node[str(i)] <= amount for i, amount in enumerate(amounts))


def make_supervisor(folder, **changes):
    values = {"num_hosts": 1, "num_workers": 1, "preload_modules": []}
    return HostSupervisor(PythonToolConfig(**(values | changes)), folder, host_timeout_s=300.0)


def test_too_many_hosts_is_an_error(ray_local, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SANDBOX_HOST_RESOURCE", "node:__internal_head__")
    supervisor = make_supervisor(tmp_path, num_hosts=2)
    with pytest.raises(HostStartError):
        supervisor.start()
    supervisor.close()
    supervisor.close()


@pytest.fixture
def cluster(ray_local):
    """The same cluster, to which nodes can be added."""
    made = Cluster(shutdown_at_exit=False)  # no signal handlers in this process
    made.head_node = ray._private.worker.global_worker.node
    yield made
    for node in tuple(made.worker_nodes):
        made.remove_node(node)


def add_node(cluster):
    """One more node, which offers one place."""
    with patient_ray_start():
        added = cluster.add_node(wait=False, num_cpus=0, resources={RESOURCE: 1})
    deadline = time.monotonic() + 300
    while RESOURCE not in ray.cluster_resources():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return added


@pytest.mark.extended
async def test_host_of_a_lost_node_returns_with_a_new_node(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RETRY_INTERVAL_S", 0.5)
    first = await asyncio.to_thread(add_node, cluster)
    supervisor = make_supervisor(tmp_path)
    try:
        await asyncio.to_thread(supervisor.start)
        client = await supervisor.select_host()
        running = asyncio.create_task(client.call(1, "run", "import time; time.sleep(500)", 500))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(cluster.remove_node, first)
        with pytest.raises(SandboxLostError) as caught:
            await running
        assert caught.value.may_have_run
        for _ in range(2):  # the first call may wait for the failure of the replacement
            with pytest.raises(SandboxLostError) as caught:
                await supervisor.select_host()
            assert not caught.value.may_have_run
        assert supervisor.num_replaced == 1
        await asyncio.to_thread(add_node, cluster)
        async with asyncio.timeout(300):
            while True:
                try:
                    client = await supervisor.select_host()
                    break
                except SandboxLostError:
                    await asyncio.sleep(0.1)
        assert (await client.call(2, "run", "print(1)", None)).output == "1"
    finally:
        supervisor.close()
