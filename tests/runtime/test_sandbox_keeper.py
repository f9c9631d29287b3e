"""Where hosts go, by hand and as a property; a resource nobody has; a node that is gone."""

import asyncio
import time
from collections import Counter

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster

from mega_agentrl.config.sandbox_schema import PythonToolConfig
from mega_agentrl.runtime import sandbox_keeper as module
from mega_agentrl.runtime.sandbox_keeper import HostFailedError, HostKeeper, choose_node
from mega_agentrl.sandbox.supervisor import SandboxLostError

RESOURCE = module.HOST_RESOURCE


def node(name, amount=0.0, *, alive=True):
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": 4.0, RESOURCE: amount}}


def test_places_by_hand():
    nodes = [node("a", 2.0), node("b", 1.0), node("c"), node("d", 4.0, alive=False)]
    taken = Counter()
    chosen = []
    for _ in range(4):
        chosen.append(choose_node(nodes, RESOURCE, taken))
        taken[chosen[-1]] += 1
    assert chosen == ["a", "b", "a", None]
    assert choose_node(nodes, "", {"a": 1, "b": 1}) == "c"
    assert choose_node([node("a", 0.5)], RESOURCE, {}) is None
    assert choose_node([], "", {}) is None


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 12))
def test_hosts_fill_what_is_offered_and_no_more(amounts, num_hosts):
    nodes = [node(str(i), float(amount)) for i, amount in enumerate(amounts)]
    taken = Counter()
    for _ in range(num_hosts):
        if (chosen := choose_node(nodes, RESOURCE, taken)) is not None:
            taken[chosen] += 1
    assert taken.total() == min(num_hosts, sum(amounts))
    assert all(taken[str(i)] <= amount for i, amount in enumerate(amounts))


def keeper(folder, **changes):
    values = {"hosts": 1, "workers": 1, "preload": []}
    return HostKeeper(PythonToolConfig(**(values | changes)), folder, silence_s=15.0)


def test_one_host_too_many_is_an_error(ray_local, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HOST_RESOURCE", "node:__internal_head__")
    kept = keeper(tmp_path, hosts=2)
    with pytest.raises(HostFailedError, match=r"hosts=2: .* expected 2 of 'node.* offers 1 of it"):
        kept.start()
    kept.close()
    kept.close()


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
    added = cluster.add_node(wait=False, num_cpus=0, resources={RESOURCE: 1})
    deadline = time.monotonic() + 300
    while RESOURCE not in ray.cluster_resources():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return added


async def test_without_its_node_a_host_is_away_and_it_returns_with_another(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_RETRY_S", 0.5)
    first = await asyncio.to_thread(add_node, cluster)
    kept = keeper(tmp_path)
    try:
        await asyncio.to_thread(kept.start)
        link = await kept.pick()
        running = asyncio.create_task(link.ask(1, "run", "import time; time.sleep(60)", 60))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(cluster.remove_node, first)
        with pytest.raises(SandboxLostError, match=r"sandbox host 0 .* died"):
            await running
        gone = r"no sandbox host is left.*no node has room .*'sandbox_host'"
        with pytest.raises(SandboxLostError, match=gone):
            await kept.pick()
        begin = time.monotonic()
        with pytest.raises(SandboxLostError, match=gone):
            await kept.pick()
        assert time.monotonic() - begin < 30, "it was not waited for once more"
        assert kept.num_replaced == 1
        await asyncio.to_thread(add_node, cluster)
        while time.monotonic() - begin < 300:
            try:
                link = await kept.pick()
                break
            except SandboxLostError:
                await asyncio.sleep(0.1)
        assert (await link.ask(2, "run", "print(1)", None)).output == "1"
    finally:
        kept.close()
