"""Building a run: the components hold the inputs, and everything that started is closed."""

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from mega_agentrl.report.start_progress import StartProgress
from mega_agentrl.runtime import build as module
from mega_agentrl.runtime.inputs import read_inputs
from mega_agentrl.runtime.remote_calls import (
    ModelRankDiedError,
    PolicyRankDiedError,
    ProcessDiedError,
)
from mega_agentrl.runtime.workers.gpu_time_sharing import GpuTimeSharing
from mega_agentrl.tool.toolkit import ToolKit


class FakeGroup:
    """Stands in for the policy and the engines."""

    def gpu_name(self):
        return ""


@pytest.fixture
def groups(monkeypatch):
    """Stand-ins for coordinator, policy and engines; there is no Ray cluster in these tests."""
    made = FakeGroup(), FakeGroup(), FakeGroup()
    monkeypatch.setattr(module, "_start_policy_and_engines", lambda *_: made)
    monkeypatch.setattr(module.ClusterGpuMonitor, "launch", lambda: None)
    return made


class FakeCluster:
    """Stands in for the connection to a Ray cluster without GPUs; records the waits for it."""

    def __init__(self, events=None):
        self.events = [] if events is None else events

    def wait(self):
        self.events.append("cluster")
        return False


def start_of(config, stack, run_dir):
    """What the parts of a start share."""
    config.run_dir = str(run_dir)
    (run_dir / "logs").mkdir()
    return module._RunStart(config, stack, FakeCluster(), StartProgress())


@pytest.fixture
def tool_events(monkeypatch):
    """The starts and ends of the tools, which do not start."""
    events = []

    async def start(_):
        events.append("tools")

    monkeypatch.setattr(ToolKit, "start", start)
    monkeypatch.setattr(ToolKit, "close_now", lambda _: events.append("close"))
    return events


def thread_names():
    return {thread.name for thread in threading.enumerate()}


def test_an_async_run_has_an_event_loop_thread_that_ends_with_it(
    config, inputs, groups, tool_events
):
    config.rollout.max_staleness = 1
    with module.build(config, inputs, FakeCluster()) as components:
        assert "rollouts" in thread_names()
        assert components.run_coroutine(asyncio.sleep(0, "answer")) == "answer"
    assert "rollouts" not in thread_names()
    assert tool_events == ["tools", "close"]


def test_components_hold_the_contents_of_the_files(config, warm_start, groups):
    """The tools start here."""
    config.sft = warm_start
    with module.build(config, read_inputs(config), FakeCluster()) as components:
        assert (components.policy, components.generator) == (groups[0], groups[2])
        assert len(components.validation_prompts) == 30
        assert len(components.dev_prompts) == 30
        assert components.make_demonstration_batches()(3).num_rows == 3
        prompts = components.prompt_source.next_prompts(200)
        assert len({prompt.prompt_id for prompt in prompts}) == 200
        assert set(components.tools.stop_strings) == {"</python>", "</search>"}
        assert components.interactions.open_session(components.validation_prompts[0]) is None
    assert components.run_dir == Path(config.run_dir)


@pytest.mark.parametrize("num_hosts", [0, 1])
def test_tools_wait_for_ray_only_if_their_sandboxes_run_on_it(
    config, inputs, tool_events, monkeypatch, num_hosts
):
    """All that has started is closed where the next part does not start."""
    config.tool.python.num_hosts = num_hosts

    class EnginesFailedError(Exception):
        pass

    def fail(*_, **__):
        tool_events.append("engines")
        raise EnginesFailedError

    monkeypatch.setattr(module, "Placement", lambda *_, **__: RecordingGroup([], "placement"))
    monkeypatch.setattr(module.GeneratorGroup, "launch", fail)
    with pytest.raises(EnginesFailedError), module.build(config, inputs, FakeCluster(tool_events)):
        pass
    if num_hosts:
        assert tool_events == ["cluster", "tools", "engines", "close"]
    else:
        assert tool_events == ["tools", "cluster", "engines", "close"]


class RecordingGroup:
    """A policy or engines that record the methods called on them."""

    def __init__(self, events, name):
        self.events, self.name = events, name

    def __getattr__(self, method):
        return lambda *args, **kwargs: self.events.append(f"{self.name} {method}")


@pytest.mark.parametrize("colocated", [False, True])
def test_colocated_engines_start_before_the_model_is_loaded(
    config, monkeypatch, tmp_path, colocated
):
    config.cluster.colocated = colocated
    events, are_shared = [], []
    policy, engines = RecordingGroup(events, "policy"), RecordingGroup(events, "engines")
    monkeypatch.setattr(module.PolicyGroup, "launch", lambda *_, **__: policy)

    def launch(*_, shared_gpus=None, **__):
        are_shared.append(shared_gpus is not None)
        return engines

    monkeypatch.setattr(module.GeneratorGroup, "launch", launch)
    monkeypatch.setattr(module, "Placement", lambda *_, **__: RecordingGroup(events, "placement"))
    start = module._launch_colocated if colocated else module._launch_disaggregated
    with ExitStack() as stack:
        start(start_of(config, stack, tmp_path), False)
    assert are_shared == [colocated]
    if colocated:
        order = ["engines wait_started", "policy start", "engines close", "policy close"]
    else:
        order = ["policy start", "engines wait_started", "policy close", "engines close"]
    assert events == ["engines submit_start", *order, "placement release"]


@pytest.mark.parametrize("colocated", [False, True])
def test_gpus_are_shared_only_if_colocated(config, monkeypatch, tmp_path, colocated, capsys):
    config.cluster.colocated = colocated
    coordinated = []

    def coordinate(*parts):
        coordinated.append(parts)
        coordinator = RecordingGroup([], "coordinator")
        coordinator.connect = lambda: traffic
        return coordinator

    groups = RecordingGroup([], "policy"), RecordingGroup([], "engines")
    groups[0].kernels = lambda: "attention torch"
    traffic = SimpleNamespace(summary=lambda: "0 bytes")
    weight_sync = object()
    monkeypatch.setattr(module, "_launch_colocated", lambda *_: groups)
    monkeypatch.setattr(module, "_launch_disaggregated", lambda *_: groups)
    monkeypatch.setattr(module, "WeightSynchronizer", lambda *_, **__: weight_sync)
    monkeypatch.setattr(module, "Coordinator", coordinate)
    with ExitStack() as stack:
        module._start_policy_and_engines(start_of(config, stack, tmp_path), None)
    ((*parts, models, gpus),) = coordinated
    assert parts == [*groups, weight_sync]
    assert models._model is groups[0]
    assert isinstance(gpus, GpuTimeSharing) is colocated
    assert (tmp_path / "logs" / "weights.txt").read_text() == "0 bytes\n"
    assert "the policy computes with: attention torch" in capsys.readouterr().out


class FlakyRanks:
    """A model whose ranks die in its first `num_deaths` calls."""

    model_name = "policy"

    def __init__(self, num_deaths, error=None):
        self.num_deaths, self.calls = num_deaths, []
        self.error = error or PolicyRankDiedError("policy rank 0 died")

    def start(self, name="start"):
        self.calls.append(name)
        if len(self.calls) <= self.num_deaths:
            raise self.error

    def restart(self):
        self.start("restart")

    def connect(self):
        self.start("connect")


def test_start_of_a_models_ranks_is_retried_once_after_a_death():
    healthy, flaky, broken = map(FlakyRanks, range(3))
    critic = FlakyRanks(1, ModelRankDiedError("critic rank 0 died", "critic rank 0"))
    for ranks in (healthy, flaky, critic):
        module._start_ranks(ranks)
    with pytest.raises(PolicyRankDiedError):
        module._start_ranks(broken)
    assert healthy.calls == ["start"]
    assert flaky.calls == critic.calls == broken.calls == ["start", "restart"]


def test_policy_whose_rank_dies_while_the_first_link_opens_is_restarted_once():
    healthy, flaky, broken = map(FlakyRanks, range(3))
    module._connect(healthy)
    module._connect(flaky)
    with pytest.raises(PolicyRankDiedError):
        module._connect(broken)
    assert healthy.calls == ["connect"]
    assert flaky.calls == ["connect", "restart", "connect"]
    assert broken.calls == ["connect", "restart"]


class FlakyEngines:
    """Engines of which the n-th wait reports the n-th of `dead` as died."""

    def __init__(self, *dead):
        self.dead, self.waits, self.routable_engines = list(dead), [], []

    def wait_started(self, calls):
        self.waits.append(dict(calls))
        if self.dead:
            name = self.dead.pop(0)
            raise ProcessDiedError(f"{name} died", name)

    def respawn_engine(self, index):
        return {f"engine {index}": "again"}

    def enable_routing(self, index):
        self.routable_engines.append(index)


def test_each_engine_that_dies_in_its_start_is_started_once_more():
    starting = {"engine 0": "first", "engine 1": "first"}
    healthy, flaky, all_flaky = FlakyEngines(), FlakyEngines("engine 1"), FlakyEngines(*starting)
    for engines in (healthy, flaky, all_flaky):
        module._wait_for_engines(engines, starting)
    with pytest.raises(ProcessDiedError) as caught:
        module._wait_for_engines(FlakyEngines("engine 1", "engine 0", "engine 1"), starting)
    assert caught.value.process_name == "engine 1"
    assert (healthy.waits, healthy.routable_engines) == ([starting], [])
    assert flaky.waits == [starting, {"engine 0": "first", "engine 1": "again"}]
    assert flaky.routable_engines == [1]
    assert all_flaky.waits[-1] == {"engine 0": "again", "engine 1": "again"}
    assert all_flaky.routable_engines == [0, 1]
