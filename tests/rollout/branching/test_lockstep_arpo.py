"""Lock-step ARPO: every golden trace, and properties for any scripted engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.branching.lockstep_arpo import LockstepArpoRollout
from mega_agentrl.types.records import StopReason
from tests.fakes import FakeGenerator, FakeSession, FakeTools, make_context, make_prompt, turns
from tests.rollout.grown_trees import CALL, END
from tests.rollout.lockstep_script import (
    GOLDEN,
    ReleasedCodeRollout,
    ScriptedEngine,
    ScriptedTools,
    context_of,
    runs,
    shown,
)
from tests.rollout.virtual_time import run_virtually


def _replay(scenario, row, baselines):
    """Run one batch of a trace: batch, trees, engine, tools, and the unused random numbers."""
    engine = ScriptedEngine(row["rounds"])
    tools = ScriptedTools(scenario["config"]["tool_table"])
    prompts = [
        make_prompt(f"p{index}", question=text.removesuffix("?"))
        for index, text in enumerate(scenario["prompts"])
    ]
    uniforms = iter(row["uniforms"])
    batch = ReleasedCodeRollout(
        context_of(scenario, engine, tools),
        prompts,
        [prompt.prompt_id for prompt in prompts],
        baselines=baselines,
        draw=lambda: next(uniforms),
    )
    engine.batch = batch
    trees = run_virtually(asyncio.wait_for(batch.run(), 20))
    return batch, trees, engine, tools, list(uniforms)


def _check_rounds(batch, engine, row):
    assert len(batch.rounds) == len(row["rounds"])
    for index, expected in enumerate(row["rounds"]):
        got = batch.rounds[index]
        limits = [limit for number, limit in engine.max_tokens if number == index]
        assert limits == [expected["max_tokens"]] * len(expected["active"])
        assert got.active == expected["active"]
        assert len(got.decisions) == len(expected["decisions"])
        for (number, decision), coin in zip(got.decisions, expected["decisions"], strict=True):
            assert number == coin["traj"] and decision.threshold == coin["u"]
            assert decision.probe_entropies[0] == pytest.approx(coin["H_now"], abs=1e-9)
            assert decision.baseline_entropy == pytest.approx(coin["H_init"], abs=1e-9)
            assert decision.delta_h == pytest.approx(coin["delta"], abs=1e-9)
            assert bool(decision.num_forks) is coin["branch"]
        for number, new in zip(got.created, expected["new"], strict=True):
            path = batch.trajectories[number]
            assert (number, path.prompt_index) == (new["traj"], new["sample"])
            assert (len(path.path) > 1) is (new["kind"] == "branch")


def _check_final(batch, trees, scenario, row):
    records = {one.trajectory_id: one for tree in trees for one in tree.trajectories}
    assert len(records) == len(row["final"])
    in_order = [
        path
        for sample in range(len(trees))
        for path in batch.trajectories
        if path.prompt_index == sample
    ]
    numbers = {path.trajectory_id: path.trajectory_index for path in batch.trajectories}
    roots = scenario["config"]["initial_rollouts"]
    for path, expected in zip(in_order, row["final"], strict=True):
        got = records[path.trajectory_id]
        assert (path.trajectory_index, path.prompt_index) == (expected["traj"], expected["sample"])
        assert shown(got.token_ids) == expected["response_text"]
        assert len(got.token_ids) == expected["response_len"]
        assert runs(got.loss_mask) == expected["mask_rle"]
        assert got.num_tool_calls == expected["tool_calls"]
        assert got.fork_len == expected["fork_len"]
        parent = None if got.parent_id is None else numbers[got.parent_id]
        assert parent == expected["parent"]
        if parent is not None:
            kind = "branch"
        else:
            kind = "initial" if got.path[0] < roots else "backfill"
        assert kind == expected["kind"]


@pytest.mark.parametrize("scenario", GOLDEN, ids=lambda scenario: scenario["name"])
def test_traces_are_those_of_the_released_code(scenario):
    baselines = {}
    for row in scenario["batches"]:
        before = {int(key): value for key, value in row["initial_entropy_before"].items()}
        assert before == pytest.approx(baselines, abs=1e-9)
        batch, trees, engine, tools, uniforms = _replay(scenario, row, baselines)
        assert uniforms == []
        _check_rounds(batch, engine, row)
        _check_final(batch, trees, scenario, row)
        reached = [
            one.stop_reason is StopReason.call_limit for tree in trees for one in tree.trajectories
        ]
        metrics = row["metrics"]
        assert tools.num_calls == metrics["total_calls"]
        assert tools.num_failed == metrics["failed_calls"]
        assert tools.num_calls - tools.num_failed == metrics["successful_calls"]
        assert sum(reached) == metrics["call_limit_reached_count"]
        assert all(session.released == 1 for session in tools.sessions)


def _batch(generator, *, tools=None, bugs=None, num_prompts=2, **options):
    """bugs: keyword arguments of `ReleasedCodeRollout`; None for the rollout without them."""
    branch = BranchConfig(**options.pop("branch", {}))
    values = {"group_size": 6, "max_response_tokens": 150, "branching": Branching.released}
    config = RolloutConfig(**(values | {"branch": branch} | options))
    context = make_context(config, generator=generator, tools=tools or FakeTools())
    prompts = [make_prompt(f"p{index}", question=f"Q{index}") for index in range(num_prompts)]
    keys = [prompt.prompt_id for prompt in prompts]
    if bugs is None:
        return LockstepArpoRollout(context, prompts, keys)
    return ReleasedCodeRollout(context, prompts, keys, **bugs)


def _run(generator, **options):
    return run_virtually(asyncio.wait_for(_batch(generator, **options).run(), 20))


def test_missing_trajectories_are_created_one_after_another():
    batch = _batch(
        FakeGenerator(turns(END)),
        bugs={"baselines": {}, "draw": lambda: 0.9},
        branch={"initial_rollouts": 2},
        num_prompts=1,
    )
    (tree,) = run_virtually(batch.run())
    assert [one.active for one in batch.rounds] == [[0, 1], [2], [3], [4], [5]]
    assert tree.num_extra_roots == 4 and tree.num_forks == 0
    assert [one.path for one in tree.trajectories] == [(index,) for index in range(6)]


def test_first_decisions_have_no_delta_and_random_numbers_differ():
    generator = FakeGenerator(turns("go" + CALL, "on" + CALL, END))
    trees = _run(generator, branch={"initial_rollouts": 2, "beta": 2.0})
    decisions = [one.decisions for tree in trees for one in tree.trajectories if one.decisions]
    assert all(own[0].delta_h == 0 and own[0].probability == 0.5 for own in decisions)
    assert all(own[1].delta_h != 0 for own in decisions if len(own) > 1)
    coins = [decision.threshold for own in decisions for decision in own]
    assert len(set(coins)) == len(coins) > 4 and all(0 <= coin < 1 for coin in coins)
    for decision in (decision for own in decisions for decision in own):
        assert bool(decision.num_forks) is (decision.threshold <= decision.probability)


def test_baselines_end_with_the_batch():
    def deltas(level):
        generator = FakeGenerator(turns(CALL, END), entropy=lambda *_: level)
        trees = _run(generator, branch={"initial_rollouts": 3})
        return {d.delta_h for tree in trees for one in tree.trajectories for d in one.decisions}

    assert deltas(0.1) == deltas(4.0) == {0.0}


def test_forks_of_one_parent_open_one_after_another():
    class Session(FakeSession):
        busy = False

        async def fork(self):
            assert not self.busy
            self.busy = True
            await asyncio.sleep(0)
            self.busy = False
            child = Session(self.provider, list(self.history))
            self.provider.sessions.append(child)
            return child

    class Tools(FakeTools):
        def open_session(self):
            return Session(self)

    tools = Tools()
    branch = {"initial_rollouts": 1, "num_forks_per_decision": 5, "alpha": 1.0}
    trees = _run(FakeGenerator(turns(CALL, END)), tools=tools, branch=branch)
    assert [tree.num_forks for tree in trees] == [5, 5] and len(tools.sessions) == 12


def test_tools_that_cannot_be_made_or_forked_still_give_m_trajectories():
    for tree in _run(FakeGenerator(turns(END)), tools=FakeTools(fails_at="create")):
        assert len(tree.trajectories) == 6 and all(one.failed for one in tree.trajectories)
    branch = {"initial_rollouts": 1, "alpha": 1.0}
    tools = FakeTools(fork_fails=True)
    for tree in _run(FakeGenerator(turns(CALL, END)), tools=tools, branch=branch):
        failed = [one.failed for one in tree.trajectories]
        assert len(failed) == 6 and any(failed) and not failed[0]


def test_an_engine_without_log_probs_is_named():
    class Bare(FakeGenerator):
        async def generate(self, request):
            return replace(await super().generate(request), top_logps=())

    tools = FakeTools()
    with pytest.raises(InputError) as caught:
        _run(Bare(turns(CALL, END)), tools=tools)
    assert caught.value.name.endswith("top_logps of the engine")
    assert all(session.released == 1 for session in tools.sessions)


@pytest.mark.parametrize("num_requests", [1, 6, 9, 14])
async def test_cancelling_a_batch_releases_every_session(num_requests):
    generator, tools = FakeGenerator(turns("go" + CALL, END), delays=1), FakeTools(delays=2)
    task = asyncio.create_task(_batch(generator, tools=tools).run())
    while len(generator.requests) < num_requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 300)
    assert all(session.released >= 1 for session in tools.sessions)
    assert not generator.running
