"""A tool of one's own from its yaml file to reward, metrics and dump; and its faults."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.reward import RewardConfig
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.reward.rubric import WeightedRubric
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.io.render import render_trajectory
from mega_agentrl.rollout.metrics.rollout import rollout_metrics
from mega_agentrl.tool.base import Tool, ToolResponse
from mega_agentrl.tool.gsm8k import NO_IMPROVEMENT_REWARD
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.tool.user_tools import load_user_tools
from mega_agentrl.types.records import StopReason, ToolStatus
from tests.fakes import EOS, FakeGenerator, make_context, make_prompt, turns

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tools.yaml"


def grow(tools, texts, *, reward=None, num_trajectories=1, **prompt):
    context = make_context(
        RolloutConfig(
            group_size=num_trajectories, branching=Branching.none, max_response_tokens=2000
        ),
        generator=FakeGenerator(turns(*texts)),
        tools=ToolKit(tools),
        max_model_len=4000,
    )
    rubric = WeightedRubric(reward or RewardConfig())
    (tree,) = asyncio.run(collect_rollouts([make_prompt(**prompt)], rubric, context))
    return tree


def test_the_example_tool_of_gsm8k_decides_the_reward():
    tree = grow(
        load_user_tools(EXAMPLE),
        [
            "<think> a </think><gsm8k>17</gsm8k>",
            "<gsm8k> $18.00 </gsm8k>",
            f"<answer> \\boxed{{18}} </answer>{EOS}",
        ],
        reward=RewardConfig(rubric={"default": {"arpo": 1.0, "gsm8k": 0.5}}),
        ground_truth="18",
        tools_kwargs={"gsm8k": {"create_kwargs": {"ground_truth": "6 * 3 = 18\n#### 18"}}},
    )
    (one,) = tree.trajectories
    assert one.step_rewards == {"gsm8k": [NO_IMPROVEMENT_REWARD, 0.0]}
    assert one.tool_rewards == {"gsm8k": 1.0}
    assert one.score.parts == pytest.approx({"arpo": 1.0, "gsm8k": 0.475})
    assert one.score.value == pytest.approx(1.475)
    assert float(pack_trees([tree]).reward_B[0]) == pytest.approx(1.475)
    got = rollout_metrics([tree])
    assert got["rollout/tool/gsm8k/num_ok"] == 2
    assert got["rollout/tool/gsm8k/metric/right"] == 0.5
    assert got["rollout/tool/gsm8k/step_reward"] == pytest.approx(NO_IMPROVEMENT_REWARD)
    assert got["rollout/tool/gsm8k/final_reward"] == 1.0
    assert got["reward/gsm8k"] == pytest.approx(0.475)
    text = render_trajectory(one)
    assert all(shown in text for shown in ("gsm8k: steps -0.05 0, final 1", "1.475", "arpo 1"))


class Post(Tool):
    """Something with side effects that breaks for one trajectory."""

    name = "post"
    text_argument = "text"

    def __init__(self, step: str) -> None:
        self.step, self.num_made, self.num_open = step, 0, 0
        self.posted: list[int] = []

    async def create(self, kwargs):
        self.num_made += 1
        self.num_open += 1
        return self.num_made

    async def execute(self, state, arguments, kwargs):
        self.posted.append(state)
        if state == 1 and self.step == "execute":
            raise OSError("connection lost")
        return ToolResponse(text="posted")

    async def calc_reward(self, state, kwargs):
        if state == 1 and self.step == "calc_reward":
            raise KeyError("score")
        return 1.0

    async def release(self, state, kwargs):
        self.num_open -= 1


@pytest.mark.parametrize(
    ("step", "answer"),
    [("execute", "OSError: connection lost"), ("calc_reward", "calc_reward: KeyError: 'score'")],
)
def test_our_fault_masks_one_trajectory_and_runs_nothing_twice(step, answer):
    post = Post(step)
    texts = ["<think> a </think><post> x </post>", f"<answer> \\boxed{{1}} </answer>{EOS}"]
    tree = grow([post], texts, num_trajectories=3)
    failed = [one for one in tree.trajectories if one.failed]
    assert len(failed) == 1
    assert failed[0].stop_reason is StopReason.tool_failure and failed[0].score is None
    assert failed[0].turns[-1].outcome.status is ToolStatus.infra_error
    assert failed[0].turns[-1].outcome.answer == answer
    assert sorted(post.posted) == [1, 2, 3] and post.num_open == 0
    batch = pack_trees([tree])
    trained = batch.mask_BT.any(dim=1).tolist()
    assert trained == [not one.failed for one in tree.trajectories]
    assert rollout_metrics([tree])["rollout/tool/post/num_infra_error"] == 1
    assert answer in render_trajectory(failed[0])


class Counted(Tool):
    """Takes its time at every step and counts its open states."""

    def __init__(self, name: str, argument: str, rng: random.Random) -> None:
        self.name, self.text_argument, self._rng = name, argument, rng
        self.num_open = self.num_opened = 0

    async def _wait(self):
        await asyncio.sleep(self._rng.random() * 0.002)

    async def create(self, kwargs):
        await self._wait()
        self.num_open += 1
        self.num_opened += 1
        try:
            await self._wait()
        except asyncio.CancelledError:
            self.num_open -= 1
            raise
        return object()

    async def execute(self, state, arguments, kwargs):
        await self._wait()
        return ToolResponse(text="ok")

    async def fork(self, state):
        return await self.create({})

    async def calc_reward(self, state, kwargs):
        await self._wait()

    async def release(self, state, kwargs):
        await self._wait()
        self.num_open -= 1


@pytest.mark.parametrize("seed", range(25))
async def test_whenever_a_collection_is_cancelled_no_state_stays_open(seed):
    rng = random.Random(seed)
    tools = [Counted("search", "query", rng), Counted("python", "code", rng)]
    context = make_context(
        RolloutConfig(group_size=8, max_response_tokens=400),
        generator=FakeGenerator(delays=seed),
        tools=ToolKit(tools),
        max_model_len=1000,
        seed=seed,
    )
    prompts = [make_prompt("a"), make_prompt("b")]
    collecting = asyncio.create_task(
        collect_rollouts(prompts, WeightedRubric(RewardConfig()), context)
    )
    while not tools[0].num_opened and not collecting.done():
        await asyncio.sleep(0.001)
    await asyncio.sleep(rng.random() * 0.04)
    collecting.cancel()
    await asyncio.wait({collecting}, timeout=300)
    assert collecting.done()
    # A state that was made at the very moment is released behind the cancellation.
    deadline = asyncio.get_running_loop().time() + 300
    while any(tool.num_open for tool in tools) and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.005)
    assert [tool.num_open for tool in tools] == [0, 0]
    assert tools[0].num_opened > 0
