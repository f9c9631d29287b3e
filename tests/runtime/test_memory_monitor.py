"""Memory metrics report the maximum over processes; failed processes are left out."""

import pytest
import ray

from mega_agentrl.runtime.memory_monitor import ClusterMemoryMonitor


class Group:
    """Ranks or engines with prepared answers; an exception stands for a failed call."""

    routable_engines = (0, 1)

    def __init__(self, *answers):
        self._answers = answers

    def submit(self, method, *, engines=None):
        assert method == ("memory_stats" if engines is None else "memory")
        return {f"{number}": answer for number, answer in enumerate(self._answers)}


@pytest.fixture
def answers(monkeypatch):
    """Replace ray.wait and ray.get; `late` answers are never ready."""

    def get(answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(refs, *, num_returns, timeout):
        ready = [ref for ref in refs if ref != "late"]
        return ready, [ref for ref in refs if ref == "late"]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)


@pytest.mark.usefixtures("answers")
def test_metrics_are_maxima_over_the_processes_that_answer():
    policy = Group(
        {"peak_mib": 10.0, "libraries_mib": 300.0, "micro_batch_tokens": 70.0},
        {"peak_mib": 12.5, "libraries_mib": 299.0, "micro_batch_tokens": 64.0},
        "late",
        ray.exceptions.RayActorError(),
    )
    generator = Group([{"peak_mib": 2.0}, {"peak_mib": 3.0}], "late")
    assert ClusterMemoryMonitor(policy, generator).collect() == {
        "memory/policy_peak_mib": 12.5,
        "memory/policy_libraries_mib": 300.0,
        "memory/max_micro_batch_tokens": 70.0,
        "memory/engine_peak_mib": 3.0,
    }
    assert ClusterMemoryMonitor(Group("late"), Group()).collect() == {}
