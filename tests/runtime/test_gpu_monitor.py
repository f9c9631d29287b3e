"""`ClusterGpuMonitor` with late answers and lost nodes; Ray's calls are replaced."""

import pytest
import ray
import ray.exceptions

from mega_agentrl.report.gpu.sampler import GpuSummary
from mega_agentrl.runtime import gpu_monitor as module
from mega_agentrl.runtime.gpu_monitor import ClusterGpuMonitor, NodeGpuSampler


class Node:
    """An actor whose `collect` gives the next of these answers; an error among them is raised."""

    def __init__(self, *answers):
        self.answers, self.num_asked, self.is_busy, self.is_killed = list(answers), 0, False, False
        self.collect = self

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


def test_late_answer_counts_for_the_next_step(cluster):
    quick, slow = Node(0.5, 0.25), Node(1.0)
    monitor = ClusterGpuMonitor({"quick": quick, "slow": slow})
    slow.is_busy = True
    assert monitor.collect()["gpu/num_gpus"] == 1
    slow.is_busy = False
    metrics = monitor.collect()
    assert (metrics["gpu/num_gpus"], metrics["gpu/util/max"]) == (2, 1.0)
    assert metrics["gpu/util/worst"] == "quick GPU 0"
    assert (quick.num_asked, slow.num_asked) == (2, 1), "asked again before it had answered"


def test_lost_node_is_logged_once_and_left_out(cluster, caplog):
    lost = Node(ray.exceptions.RayActorError())
    monitor = ClusterGpuMonitor({"good": Node(0.5, 0.5), "bad": lost})
    assert monitor.collect()["gpu/num_gpus"] == monitor.collect()["gpu/num_gpus"] == 1
    assert caplog.text.count("the GPUs of bad are no longer monitored") == 1
    assert lost.num_asked == 1


def test_close_kills_all_samplers(cluster):
    nodes = {"a": Node(), "b": Node()}
    monitor = ClusterGpuMonitor(nodes)
    monitor.close()
    monitor.close()
    assert all(node.is_killed for node in nodes.values())
    assert monitor.collect() == {}


@pytest.mark.parametrize(
    "nodes",
    [[], [{"Alive": True, "Resources": {"CPU": 2.0}}], [{"Alive": False, "Resources": {}}]],
    ids=["no node", "no GPU", "lost node"],
)
def test_without_gpus_no_sampler_is_started(monkeypatch, nodes):
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert ClusterGpuMonitor.launch() is None


def test_node_without_a_driver_has_no_samples(monkeypatch):
    monkeypatch.setattr(module, "open_nvml_reader", lambda: None)
    assert NodeGpuSampler().collect() == []
