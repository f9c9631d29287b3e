"""Memory figures of ranks and workers become metrics of the fullest; who fails is left out."""

import pytest
import ray

from mega_agentrl.runtime.memory_watch import GroupMemory, memory_metrics


def test_the_fullest_counts():
    ranks = [
        {"peak_mib": 10.0, "libraries_mib": 300.0, "micro_batch_tokens": 70.0},
        {"peak_mib": 12.5, "libraries_mib": 299.0, "micro_batch_tokens": 64.0},
    ]
    assert memory_metrics(ranks, [{"peak_mib": 1200.0}]) == {
        "memory/policy_peak_mib": 12.5,
        "memory/policy_libraries_mib": 300.0,
        "memory/micro_batch_tokens": 70.0,
        "memory/engine_peak_mib": 1200.0,
    }
    assert memory_metrics([], []) == {}


class Group:
    """Ranks or engines whose answers are there already; an error is one that failed."""

    admitted = (0, 1)

    def __init__(self, *answers):
        self._answers = answers

    def start_call(self, method, *, only=None):
        assert method == "memory"
        return {f"{number}": answer for number, answer in enumerate(self._answers)}


@pytest.fixture
def answers(monkeypatch):
    """ray.wait and ray.get over plain answers; `late` ones are never ready."""

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
def test_late_and_dead_ones_are_left_out():
    policy = Group({"peak_mib": 1.0}, "late", ray.exceptions.RayActorError())
    generator = Group([{"peak_mib": 2.0}, {"peak_mib": 3.0}], "late")
    assert GroupMemory(policy, generator).take() == {
        "memory/policy_peak_mib": 1.0,
        "memory/engine_peak_mib": 3.0,
    }
