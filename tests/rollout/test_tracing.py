"""The spans of real collector runs, exported to memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.groups.scoring import cancel_scores, start_scores
from mega_agentrl.rollout.tracing import RolloutSpans
from mega_agentrl.types.records import RolloutTree, ToolStatus
from tests.fakes import (
    FakeGenerator,
    FakeRubric,
    FakeTools,
    make_context,
    make_prompt,
    make_trajectory,
    turns,
)
from tests.rollout.grown_trees import CALL, END
from tests.rollout.stepped_engine import StuckGenerator

PROMPTS = [make_prompt(f"p{index}", question=f"Q{index}") for index in range(3)]
CALL_THEN_ANSWER = turns(CALL, END)


@pytest.fixture
def memory():
    return InMemorySpanExporter()


@pytest.fixture
def spans(memory):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    yield RolloutSpans(provider.get_tracer("test"))
    provider.shutdown()


def collect(spans, prompts=PROMPTS[:1], generator=None, tools=None, **config):
    """Start a pass; returns the coroutine."""
    values = {"group_size": 1, "max_response_tokens": 120, "branching": Branching.none}
    context = make_context(
        RolloutConfig(**(values | config)),
        generator=generator or FakeGenerator(CALL_THEN_ANSWER),
        tools=tools or FakeTools(),
        step="train-1",
        spans=spans,
    )
    return collect_rollouts(prompts, FakeRubric(), context)


def run(*arguments, **options):
    return asyncio.run(collect(*arguments, **options))


def drawn(memory):
    """`{span: names of its children in order of their start}`, names with what tells them apart."""
    found = memory.get_finished_spans()
    name = {one.context.span_id: _named(one) for one in found}
    children = {text: [] for text in name.values()}
    for one in sorted(found, key=lambda one: one.start_time):
        above = name.get(one.parent.span_id) if one.parent else None
        children.setdefault(above, []).append(_named(one))
    return children


def _named(span):
    about = span.attributes
    kept = ("trajectory.id", "turn.index", "wait.for", "gen_ai.tool.name")
    return " ".join([span.name, *(str(about[key]) for key in kept if key in about)])


def one(memory, name):
    (found,) = [span for span in memory.get_finished_spans() if span.name == name]
    return found


def test_a_trajectory_has_spans_of_its_turns_calls_and_waits(memory, spans):
    run(spans)
    assert drawn(memory) == {
        None: ["trajectory p0/train-1/0"],
        "trajectory p0/train-1/0": ["wait tools", "turn 0", "turn 1", "wait reward"],
        "turn 0": ["generate", "tool search"],
        "turn 1": ["generate"],
        "generate": [],
        "tool search": [],
        "wait tools": [],
        "wait reward": [],
    }
    assert one(memory, "tool").attributes["tool.status"] == "ok"


def test_span_attributes_give_the_outcome_and_the_counts(memory, spans):
    (tree,) = run(spans)
    (trajectory,) = tree.trajectories
    about = dict(one(memory, "trajectory").attributes)
    assert about == {
        "trajectory.id": "p0/train-1/0",
        "prompt.id": "p0",
        "data_source": "fake",
        "step": "train-1",
        "outcome": "eos",
        "tokens": len(trajectory.token_ids),
        "tokens.sampled": sum(trajectory.loss_mask),
        "tool_calls": 1,
        "reward": trajectory.score.value,
        "success": True,
    }
    requests = [s.attributes for s in memory.get_finished_spans() if s.name == "generate"]
    sampled = [about["gen_ai.usage.output_tokens"] for about in requests]
    assert sum(sampled) == sum(trajectory.loss_mask)
    assert [about["finish"] for about in requests] == ["stop", "eos"]


@pytest.mark.parametrize("branching", [Branching.after_result, Branching.released])
def test_every_trajectory_has_one_span_around_its_turns(memory, spans, branching):
    trees = run(
        spans,
        PROMPTS,
        generator=FakeGenerator(delays=3),
        tools=FakeTools(delays=4),
        group_size=6,
        branching=branching,
    )
    everyone = {one.trajectory_id: one for tree in trees for one in tree.trajectories}
    found = memory.get_finished_spans()
    by_id = {span.context.span_id: span for span in found}
    roots = {s.attributes["trajectory.id"]: s for s in found if s.name == "trajectory"}
    assert roots.keys() == everyone.keys() and len(everyone) == 18
    num_forks = 0
    for name, span in roots.items():
        parent = everyone[name].parent_id
        num_forks += parent is not None
        above = by_id[span.parent.span_id].attributes["trajectory.id"] if span.parent else None
        assert above == parent
        assert span.attributes["reward"] == everyone[name].score.value
    assert num_forks == sum(tree.num_forks for tree in trees) > 0
    for span in found:
        if span.name != "trajectory":
            above = by_id[span.parent.span_id]
            assert above.start_time <= span.start_time <= span.end_time <= above.end_time
    counts = Counter(span.name for span in found)
    assert counts["tool"] > 0 and counts["generate"] >= counts["turn"] >= 18


def test_time_in_the_queue_of_a_tool_is_a_wait_of_its_own(memory, spans):
    class Slots(FakeTools):
        def open_session(self):
            session = super().open_session()
            execute = session.execute

            async def queued(tool, arguments):
                await asyncio.sleep(0.03)
                return replace(await execute(tool, arguments), queue_s=0.02)

            session.execute = queued
            return session

    run(spans, tools=Slots())
    assert drawn(memory)["turn 0"] == ["generate", "wait slot search", "tool search"]
    (wait,) = [s for s in memory.get_finished_spans() if _named(s) == "wait slot search"]
    assert wait.end_time - wait.start_time == 20_000_000
    assert one(memory, "tool").start_time == wait.end_time


def test_a_failed_trajectory_is_marked(memory, spans):
    run(spans, tools=FakeTools(status=lambda text: ToolStatus.infra_error))
    span = one(memory, "trajectory")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["outcome"] == "tool_failure"
    assert "reward" not in span.attributes


def test_an_engine_that_dies_leaves_its_request(memory, spans):
    run(spans, generator=FakeGenerator(CALL_THEN_ANSWER, breaks=lambda request: True))
    assert one(memory, "generate").status.description == "RuntimeError: engine 0 died"
    assert one(memory, "trajectory").attributes["outcome"] == "aborted"


def test_a_cancelled_pass_leaves_no_open_span(memory, spans):
    async def cancelled():
        generator = StuckGenerator()
        task = asyncio.create_task(collect(spans, generator=generator, group_size=2))
        while len(generator.requests) < 2:
            await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    names = Counter(span.name for span in memory.get_finished_spans())
    assert names == {"trajectory": 2, "turn": 2, "generate": 2, "wait": 2}


def test_a_score_that_comes_late_or_never_ends_the_span(memory, spans):
    class Later:
        def score(self, trajectory):
            return Future()

    for name in ("late", "never", "left"):
        spans.start_trajectory(name, {"trajectory.id": name}, None)
        spans.mark_ended(name)
        trajectory = make_trajectory(trajectory_id=name)
        tree = RolloutTree(prompt=PROMPTS[0], trajectories=[trajectory])
        (pending,) = start_scores(tree, Later(), spans)
        assert not memory.get_finished_spans()
        if name == "late":
            pending.future.set_result(FakeRubric().score(trajectory))
            pending.resolve()
            assert one(memory, "trajectory").attributes["success"] is False
        elif name == "never":
            cancel_scores([pending])
            assert "reward" not in one(memory, "trajectory").attributes
        else:
            spans.close()
            assert one(memory, "trajectory").attributes["trajectory.id"] == "left"
        memory.clear()


def test_without_spans_the_trees_are_the_same(spans):
    config = {"group_size": 4, "branching": Branching.after_result}
    assert run(spans, PROMPTS, generator=FakeGenerator(), **config) == run(
        None, PROMPTS, generator=FakeGenerator(), **config
    )
