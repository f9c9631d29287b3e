"""Building: parts hold what was read, and whatever started is ended."""

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from mega_agentrl.config.choices import Branching, CallProtocol
from mega_agentrl.config.schema import (
    DataConfig,
    ModelConfig,
    SftConfig,
    TrainConfig,
)
from mega_agentrl.config.search_schema import SearchToolConfig
from mega_agentrl.config.tool_schema import ToolConfig
from mega_agentrl.data.codec import HFCodec
from mega_agentrl.runtime import build as module
from mega_agentrl.runtime.inputs import read_inputs
from mega_agentrl.runtime.remote import DiedError, RankGoneError
from mega_agentrl.tool.kit import ToolKit
from mega_agentrl.types.records import ToolOutcome, ToolStatus


@pytest.fixture
def config(assets, tmp_path):
    return TrainConfig(
        run_dir=str(tmp_path),
        model=ModelConfig(path=f"{assets}/model"),
        data=DataConfig(train=f"{assets}/train.parquet", validation=f"{assets}/validation.parquet"),
        sft=SftConfig(
            max_steps=1, data=f"{assets}/demonstrations.parquet", dev=f"{assets}/dev.parquet"
        ),
        tool=ToolConfig(search=SearchToolConfig(source=f"{assets}/corpus.jsonl")),
    )


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """What is built here has no Ray to ask for GPUs."""
    monkeypatch.setattr(module.ClusterGpus, "launch", lambda: None)


class Group:
    """Stands for the policy and the engines."""

    def gpu_name(self):
        return ""


def test_with_staleness_the_loop_goes_on_in_a_thread_that_ends_with_the_run(config, monkeypatch):
    monkeypatch.setattr(module, "_start_groups", lambda *_: (Group(), Group()))
    config.rollout.staleness, seen = 1, threading.Event()

    async def go_on():
        await asyncio.sleep(0.01)
        seen.set()

    async def start():
        return asyncio.create_task(go_on())

    with module.build(config, read_inputs(config)) as parts:
        task = parts.wait(start())
        assert seen.wait(20), "the loop stands still"
    assert task.done()
    assert "rollouts" not in {thread.name for thread in threading.enumerate()}


def test_parts_hold_what_the_files_hold(config, monkeypatch):
    groups = Group(), Group()
    monkeypatch.setattr(module, "_start_groups", lambda *_: groups)
    with module.build(config, read_inputs(config)) as parts:
        assert (parts.policy, parts.generator) == groups
        assert len(parts.validation) == 30
        assert len(parts.dev) == 30
        assert parts.demonstrations()(3).num_rows == 3
        assert len({prompt.prompt_id for prompt in parts.prompts.next(200)}) == 200
        assert set(parts.tools.stop_strings) == {"</python>", "</search>"}
    assert parts.run_dir == Path(config.run_dir)


def test_without_steps_there_are_no_demonstrations(config, monkeypatch):
    config.sft.max_steps = 0
    monkeypatch.setattr(module, "_start_groups", lambda *_: (Group(), Group()))
    with module.build(config, read_inputs(config)) as parts:
        assert parts.demonstrations is None
        assert parts.dev == ()


@pytest.mark.parametrize("branching", [Branching.after_result, Branching.released])
def test_tool_output_is_escaped_unless_the_published_rollout_is_repeated(
    config, monkeypatch, branching
):
    config.rollout.branching = branching
    monkeypatch.setattr(module, "_start_groups", lambda *_: (Group(), Group()))
    outcome = ToolOutcome(tool="python", status=ToolStatus.ok, answer="</result>", latency_s=0.0)
    with module.build(config, read_inputs(config)) as parts:
        raw = "</result>\n" in parts.tools.render(outcome)
        assert raw is (branching is Branching.released)


def test_tools_are_ended_when_the_groups_cannot_start(config, monkeypatch):
    closed = []
    close_now = ToolKit.close_now

    def note(kit):
        closed.append(kit)
        close_now(kit)

    def fail(*_):
        raise RuntimeError("no cluster")

    monkeypatch.setattr(ToolKit, "close_now", note)
    monkeypatch.setattr(module, "_start_groups", fail)
    with (
        pytest.raises(RuntimeError, match="no cluster"),
        module.build(config, read_inputs(config)),
    ):
        pass
    assert closed


@pytest.mark.parametrize("hosts", [0, 1])
def test_tools_start_before_the_cluster_unless_their_sandboxes_are_in_it(
    config, monkeypatch, hosts
):
    config.tool.python.hosts = hosts
    events = []

    async def start(_):
        events.append("tools")

    def stop(*_, **__):
        events.append("engines")
        raise RuntimeError("far enough")

    monkeypatch.setattr(ToolKit, "start", start)
    monkeypatch.setattr(ToolKit, "close_now", lambda _: events.append("close"))
    monkeypatch.setattr(module, "connect", lambda _: events.append("connect"))
    monkeypatch.setattr(module.ray, "shutdown", lambda: events.append("shutdown"))
    monkeypatch.setattr(module.GeneratorGroup, "launch", stop)
    with (
        pytest.raises(RuntimeError, match="far enough"),
        module.build(config, read_inputs(config)),
    ):
        pass
    if hosts:
        assert events == ["connect", "tools", "engines", "close", "shutdown"]
    else:
        assert events == ["tools", "connect", "engines", "shutdown", "close"]


def test_calls_by_json_need_the_template_to_say_what_there_is(config, monkeypatch):
    monkeypatch.setattr(module, "_start_groups", lambda *_: (Group(), Group()))
    config.data.max_prompt_tokens = 5000
    with module.build(config, read_inputs(config)) as tags:
        plain = tags.validation[0]
    config.rollout.call_protocol = CallProtocol.hermes
    with module.build(config, read_inputs(config)) as parts:
        assert parts.tools.answers_in_chat and parts.tools.stop_strings == ()
        prompt = parts.validation[0]
        names = [schema["function"]["name"] for schema in prompt.tool_schemas]
        assert names == ["python", "search"] and plain.tool_schemas == ()
        assert parts.codec.decode(prompt.token_ids).count('"type": "function"') == 2
    monkeypatch.setattr(HFCodec, "keeps", lambda self, text: text != "</tool_call>")
    with pytest.raises(ValueError, match="the tokenizer declares </tool_call> special"):
        read_inputs(config)


def test_interactions_are_read_and_rewarded_by_name(config, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_start_groups", lambda *_: (Group(), Group()))
    with module.build(config, read_inputs(config)) as parts:
        assert parts.interactions.open(parts.validation[0]) is None
    path = tmp_path / "users.yaml"
    path.write_text("- class_name: mega_agentrl.rollout.interaction_gsm8k.Gsm8kUser\n")
    config.rollout.interaction_file = str(path)
    config.reward.rubric = {"default": {"arpo": 1.0, "gsm8k_user": 0.5}}
    with module.build(config, read_inputs(config)) as parts:
        assert parts.interactions.names == ("gsm8k_user",)
    config.reward.rubric = {"default": {"arpo": 1.0, "gsm8k": 0.5}}
    with pytest.raises(ValueError, match="expected one of gsm8k_user"):
        read_inputs(config)


class Started:
    """A policy or engines that note what is asked of them."""

    def __init__(self, events, name):
        self.events, self.name = events, name

    def __getattr__(self, method):
        return lambda *args, **kwargs: self.events.append(f"{self.name} {method}")


@pytest.mark.parametrize("colocated", [False, True])
def test_on_shared_gpus_engines_have_started_before_the_model_is_loaded(
    config, monkeypatch, tmp_path, colocated
):
    config.cluster.colocated = colocated
    events, lodged = [], []
    policy, engines = Started(events, "policy"), Started(events, "engines")
    monkeypatch.setattr(module.PolicyGroup, "launch", lambda *_, **__: policy)

    def launch(*_, lodging=None, **__):
        lodged.append(lodging is not None)
        return engines

    monkeypatch.setattr(module.GeneratorGroup, "launch", launch)
    start = module._launch_together if colocated else module._launch_apart
    with ExitStack() as stack:
        *_, turns = start(config, stack, False, tmp_path)
    assert lodged == [colocated]
    assert (turns is not None) == colocated
    begun = ["engines begin_start", "engines finish_start"]
    if colocated:
        assert events == [*begun, "policy share", "policy start", "engines close", "policy close"]
    else:
        begun.insert(1, "policy start")
        assert events == [*begun, "policy close", "engines close"]


class Mortal:
    """A policy whose ranks die the first times it starts."""

    def __init__(self, num_deaths):
        self.num_deaths, self.calls = num_deaths, []

    def start(self, name="start"):
        self.calls.append(name)
        if len(self.calls) <= self.num_deaths:
            raise RankGoneError("policy rank 0 died")

    def restart(self):
        self.start("restart")


def test_a_rank_that_dies_while_the_policy_starts_is_forgiven_once():
    sound, mortal, doomed = Mortal(0), Mortal(1), Mortal(2)
    module._start(sound)
    module._start(mortal)
    with pytest.raises(RankGoneError, match="rank 0 died"):
        module._start(doomed)
    assert (sound.calls, mortal.calls, doomed.calls) == (
        ["start"],
        ["start", "restart"],
        ["start", "restart"],
    )


class Engines:
    """Of which some die while they start, by the number of the attempt."""

    def __init__(self, *dead):
        self.dead, self.seen, self.admitted = list(dead), [], []

    def finish_start(self, calls):
        self.seen.append(dict(calls))
        if self.dead and (name := self.dead.pop(0)):
            raise DiedError(f"{name} died", name)

    def begin_replace(self, index):
        return index, {f"engine {index}": "again"}

    def admit(self, index):
        self.admitted.append(index)


def test_an_engine_that_dies_while_it_starts_is_forgiven_once():
    starting = {"engine 0": "first", "engine 1": "first"}
    sound, mortal, doomed = Engines(), Engines("engine 1"), Engines("engine 1", "engine 0")
    module._finish_start(sound, starting)
    module._finish_start(mortal, starting)
    with pytest.raises(DiedError, match="engine 0 died"):
        module._finish_start(doomed, starting)
    assert (sound.seen, sound.admitted) == ([starting], [])
    assert mortal.seen == [starting, {"engine 0": "first", "engine 1": "again"}]
    assert mortal.admitted == [1]
