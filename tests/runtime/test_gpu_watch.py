"""All nodes' GPUs as one: late answers and lost nodes hold nobody up.

Ray's calls are replaced: what counts here is who is asked when, and what becomes of the answers.
"""

import pytest
import ray
import ray.exceptions

from mega_agentrl.report.gpu_sampler import GpuSummary
from mega_agentrl.runtime import gpu_watch
from mega_agentrl.runtime.gpu_watch import ClusterGpus, NodeSampler


class Node:
    """An actor whose `take` gives the next of these answers; an error among them is raised."""

    def __init__(self, *answers):
        self.answers, self.num_asked, self.is_busy, self.is_killed = list(answers), 0, False, False
        self.take = self

    def remote(self):
        self.num_asked += 1
        return self, self.num_asked


@pytest.fixture
def cluster(monkeypatch):
    def wait(refs, num_returns, timeout):
        assert num_returns == len(refs) and timeout <= 1
        return [ref for ref in refs if not ref[0].is_busy], None

    def get(ref):
        answer = ref[0].answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [GpuSummary(index=0, values={"util": answer})]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda node, no_restart: setattr(node, "is_killed", True))


def test_a_late_answer_counts_for_the_next_step(cluster):
    quick, slow = Node(0.5, 0.25), Node(1.0)
    watch = ClusterGpus({"quick": quick, "slow": slow})
    slow.is_busy = True
    assert watch.take()["gpu/num"] == 1
    slow.is_busy = False
    metrics = watch.take()
    assert (metrics["gpu/num"], metrics["gpu/util/max"]) == (2, 1.0)
    assert metrics["gpu/util/worst"] == "quick GPU 0"
    assert (quick.num_asked, slow.num_asked) == (2, 1), "asked again before it had answered"


def test_a_lost_node_is_said_once_and_left_out(cluster, caplog):
    lost = Node(ray.exceptions.RayActorError())
    watch = ClusterGpus({"good": Node(0.5, 0.5), "bad": lost})
    assert watch.take()["gpu/num"] == watch.take()["gpu/num"] == 1
    assert caplog.text.count("the GPUs of bad are not watched any more") == 1
    assert lost.num_asked == 1


def test_all_samplers_are_ended(cluster):
    nodes = {"a": Node(), "b": Node()}
    watch = ClusterGpus(nodes)
    watch.close()
    watch.close()
    assert all(node.is_killed for node in nodes.values())
    assert watch.take() == {}


@pytest.mark.parametrize(
    "nodes", [[], [{"Alive": True, "Resources": {"CPU": 2.0}}], [{"Alive": False, "Resources": {}}]]
)
def test_without_gpus_nothing_is_started(monkeypatch, nodes):
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert ClusterGpus.launch() is None


def test_a_node_without_a_driver_has_nothing_to_say(monkeypatch):
    monkeypatch.setattr(gpu_watch, "open_reader", lambda: None)
    assert NodeSampler().take() == []
