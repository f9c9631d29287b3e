"""Attempts of an agent as trajectories: rewards, failures, and forks by a second instance."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.config.enums import Branching, CallProtocol
from mega_agentrl.config.sections.rollout import BranchConfig
from mega_agentrl.rollout.metrics.failures import count_failures
from mega_agentrl.tool.function import tool
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.types.errors import FirstCallsFailedError, RankLostError
from mega_agentrl.types.records import Role, Score, StopReason
from tests.rollout.agents.agent_run import get_tools, grow, post
from tests.rollout.chat_run import make_kit
from tests.rollout.gateway.chat_policy import ChatPolicy


async def adding_agent(prompt, base_url, api_key, note=None):
    """Run the tools that the policy calls, until it calls none."""
    messages, tools = list(prompt), await get_tools(base_url, api_key)
    while True:
        body = {"model": "m", "messages": messages, "tools": tools}
        answer = await post(base_url, api_key, "/chat/completions", body)
        message = answer["choices"][0]["message"]
        messages.append(message)
        for item in message.get("tool_calls", ()):
            arguments = json.loads(item["function"]["arguments"])
            result = await post(base_url, api_key, "/tools/add", arguments)
            content = result["answer"] if note is None else f"{result['answer']} {note()}"
            messages.append({"role": "tool", "tool_call_id": item["id"], "content": content})
        if not message.get("tool_calls"):
            return float(len(messages))


async def test_the_result_of_an_agent_is_a_reward_part(codec):
    tree = await grow(codec, adding_agent)
    for trajectory in tree.trajectories:
        assert trajectory.stop_reason is StopReason.eos
        shown = [turn for turn in trajectory.turns if turn.outcome is None or turn.text]
        assert trajectory.tool_rewards == {"agent": 1.0 + len(shown)}

    async def graded(prompt, base_url, api_key):
        await adding_agent(prompt, base_url, api_key)
        return {"tests": 0.5, "style": 1}

    (first, _) = (await grow(codec, graded)).trajectories
    assert first.tool_rewards == {"agent.tests": 0.5, "agent.style": 1.0}


async def raise_error(prompt):
    raise OSError("no such file")


async def return_text(prompt):
    return "good"


async def return_nan(prompt):
    return float("nan")


async def return_huge_integer(prompt):
    return 10**400


async def never_ask(prompt):
    return 0.0


async def exit_from_coroutine(prompt):
    sys.exit(2)


def exit_from_thread(prompt):
    sys.exit("usage: agent FILE")


async def cancel_itself(prompt):
    raise asyncio.CancelledError


async def hang(prompt):
    await asyncio.sleep(1000)


def block(prompt):
    time.sleep(3)


def fail_in_thread(prompt):
    raise OSError("no such file")


async def ignore_cancellation(prompt):
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(1000)
    await asyncio.sleep(0.1)


async def ask_for_ever(prompt, base_url, api_key):
    messages = list(prompt)
    while True:
        body = {"model": "m", "messages": messages}
        answer = await post(base_url, api_key, "/chat/completions", body)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "More."}]


@pytest.mark.parametrize(
    ("agent", "stop_reason"),
    [
        (raise_error, StopReason.agent_failure),
        (return_text, StopReason.agent_failure),
        (return_nan, StopReason.agent_failure),
        (return_huge_integer, StopReason.agent_failure),
        (never_ask, StopReason.agent_failure),
        (exit_from_coroutine, StopReason.agent_failure),
        (exit_from_thread, StopReason.agent_failure),
        (cancel_itself, StopReason.agent_failure),
        (fail_in_thread, StopReason.agent_failure),
        (hang, StopReason.trajectory_timeout),
        (block, StopReason.trajectory_timeout),
        (ignore_cancellation, StopReason.trajectory_timeout),
        # The policy has used up its turns: that is no failure of the agent.
        (ask_for_ever, StopReason.turn_limit),
    ],
    ids=[
        *("raises", "text", "nan", "huge integer", "never asks", "exits", "exits in a thread"),
        *("cancelled", "raises in a thread", "hangs", "blocks", "stubborn", "endless"),
    ],
)
async def test_failed_attempt_is_masked_and_has_a_reason(codec, agent, stop_reason):
    limit = {"timeout_s": 0.3} if stop_reason is StopReason.trajectory_timeout else {}
    tree = await grow(codec, agent, **limit)
    for trajectory in tree.trajectories:
        assert trajectory.stop_reason is stop_reason
        assert trajectory.failed == (stop_reason is not StopReason.turn_limit)
        assert bool(trajectory.failure_reason) == trajectory.failed


async def test_engine_failure_is_masked_unless_a_retry_succeeds(codec):
    async def asks_once(prompt, base_url, api_key):
        body = {"model": "m", "messages": prompt}
        for _ in range(2):
            try:
                await post(base_url, api_key, "/chat/completions", body)
            except RuntimeError as error:
                assert error.args == ("engine_failed",)
            else:
                return

    async def gives_up(prompt, base_url, api_key):
        with pytest.raises(RuntimeError, match="engine_failed"):
            await post(base_url, api_key, "/chat/completions", {"messages": prompt, "model": "m"})

    first_dies = ChatPolicy(codec, fails=lambda number: number == 1)
    (trajectory,) = (await grow(codec, asks_once, policy=first_dies, group_size=1)).trajectories
    assert trajectory.stop_reason is StopReason.eos
    all_die = ChatPolicy(codec, fails=lambda number: True)
    (trajectory,) = (await grow(codec, gives_up, policy=all_die, group_size=1)).trajectories
    assert trajectory.stop_reason is StopReason.aborted
    assert "engine 0 died" in trajectory.failure_reason


async def test_an_endless_recursion_is_no_abort_by_the_engine_and_counts(codec):
    class Endless(ChatPolicy):
        async def generate(self, request):
            raise RecursionError("maximum recursion depth exceeded")

    async def gives_up(prompt, base_url, api_key):
        with pytest.raises(RuntimeError, match="engine_failed"):
            await post(base_url, api_key, "/chat/completions", {"messages": prompt, "model": "m"})

    tree = await grow(codec, gives_up, policy=Endless(codec), group_size=1)
    assert tree.trajectories[0].stop_reason is StopReason.tool_failure
    assert count_failures([tree]).exceeds(0.5)


async def test_lost_rank_ends_the_run_and_not_only_the_attempt(codec):
    class LostRank(ChatPolicy):
        async def generate(self, request):
            raise RankLostError("rank 1 died")

    with pytest.raises(ExceptionGroup) as caught:
        await grow(codec, adding_agent, policy=LostRank(codec))
    assert caught.group_contains(RankLostError)


BRANCHING = {
    "branching": Branching.after_result,
    "group_size": 6,
    "branch": BranchConfig(num_probe_tokens=6, initial_rollouts=2, alpha=4.0, beta=5.0),
}


async def test_fork_repeats_its_parent_without_sampling_then_goes_its_own_way(codec):
    policy = ChatPolicy(codec, call_rate=0.9)
    tree = await grow(codec, adding_agent, policy=policy, **BRANCHING)
    assert tree.num_forks > 0
    assert tree.num_abandoned_forks == 0
    by_id = {trajectory.trajectory_id: trajectory for trajectory in tree.trajectories}
    for trajectory in tree.trajectories:
        if trajectory.parent_id is None:
            continue
        parent, size = by_id[trajectory.parent_id], trajectory.fork_len
        made_at = [item.position for item in parent.decisions if item.num_forks]
        assert size in made_at
        assert trajectory.token_ids[:size] == parent.token_ids[:size]
        assert trajectory.logps[:size] == parent.logps[:size]
        assert trajectory.logps[size:] != parent.logps[size:]
        assert trajectory.versions[:size] == parent.versions[:size]
    # The engine sampled each token of the tree once: what forks inherit was not sampled again.
    num_own = sum(
        sum(trajectory.loss_mask[trajectory.fork_len :]) for trajectory in tree.trajectories
    )
    assert num_own == sum(
        len(token_ids) * count for (_, token_ids), count in policy.sampled.items()
    )


async def test_tools_answer_from_the_record_until_the_fork(codec):
    calls = []

    @tool
    async def add(a: int, b: int) -> int:
        """Sum of two numbers."""
        calls.append((a, b))
        return a + b

    protocol = CallProtocol.hermes
    kit = ToolKit([add], control_tokens=codec.control_tokens, protocol=protocol)
    policy = ChatPolicy(codec, call_rate=0.9)
    unlimited = {"max_turns": 1000, "max_response_tokens": 9000, "max_tool_calls": 1000}
    tree = await grow(codec, adding_agent, policy=policy, kit=kit, **BRANCHING, **unlimited)
    assert tree.num_forks > 0
    num_own = sum(
        turn.role is Role.tool and turn.start >= trajectory.fork_len
        for trajectory in tree.trajectories
        for turn in trajectory.turns
    )
    assert len(calls) == num_own > 0


async def test_tree_of_an_agent_trains_every_sampled_token_once(codec):
    policy = ChatPolicy(codec, call_rate=0.9)
    tree = await grow(codec, adding_agent, policy=policy, **BRANCHING)
    batch = pack_trees(_scored(tree))
    unique = set(batch.tree_token_BT[batch.mask_BT.bool()].tolist())
    num_sampled = sum(len(ids) * count for (_, ids), count in policy.sampled.items())
    assert len(unique) == num_sampled


async def test_forks_of_an_agent_with_two_contexts_train_every_sampled_token_once(codec):
    async def alternating(prompt, base_url, api_key):
        main = list(prompt)
        sub = [{"role": "system", "content": "sub"}, {"role": "user", "content": "go"}]
        tools = await get_tools(base_url, api_key)
        for number in range(4):
            for messages in (main, sub):
                body = {"model": "m", "messages": messages, "tools": tools}
                answer = await post(base_url, api_key, "/chat/completions", body)
                message = answer["choices"][0]["message"]
                messages.append(message)
                for item in message.get("tool_calls", ()):
                    messages.append({"role": "tool", "tool_call_id": item["id"], "content": "5"})
                if not message.get("tool_calls"):
                    messages.append({"role": "user", "content": f"more {number}"})

    policy = ChatPolicy(codec, call_rate=0.9)
    tree = await grow(codec, alternating, policy=policy, **BRANCHING)
    assert tree.num_forks > 0
    batch = pack_trees(_scored(tree))
    unique = set(batch.tree_token_BT[batch.mask_BT.bool()].tolist())
    assert len(unique) == sum(len(ids) * n for (_, ids), n in policy.sampled.items())


async def test_agent_that_does_not_repeat_itself_gives_up_the_fork(codec):
    numbers = itertools.count()
    tree = await grow(
        codec,
        adding_agent,
        policy=ChatPolicy(codec, call_rate=0.9),
        options={"note": lambda: next(numbers)},
        **BRANCHING,
    )
    assert tree.num_abandoned_forks > 0
    assert tree.num_forks == 0
    assert len(tree.trajectories) == 6
    assert all(trajectory.parent_id is None for trajectory in tree.trajectories)


def _scored(tree):
    score = Score(value=1.0, correct=True, f1=1.0, answer="", reason="")
    trajectories = [replace(trajectory, score=score) for trajectory in tree.trajectories]
    return [replace(tree, trajectories=trajectories)]


async def fail_create(kwargs):
    raise OSError("no sandbox is free")


async def test_tool_failure_fails_the_attempt_although_the_agent_goes_on(codec):
    @tool
    async def look() -> str:
        """A tool whose service is down."""
        raise OSError("the service is down")

    async def goes_on(prompt, base_url, api_key):
        for _ in range(2):
            with suppress(RuntimeError):
                answer = await post(base_url, api_key, "/tools/look", {})
                assert answer["status"] == "infra_error"
        await post(base_url, api_key, "/chat/completions", {"model": "m", "messages": prompt})
        return 0.0

    for reason in ("the service is down", "no sandbox is free"):
        (first, _) = (await grow(codec, goes_on, kit=make_kit(codec, look))).trajectories
        assert first.stop_reason is StopReason.tool_failure
        assert reason in first.failure_reason
        look.create = fail_create


async def test_tool_whose_first_calls_all_fail_ends_the_run_and_not_only_the_attempts(codec):
    @tool
    async def add(a: int, b: int) -> int:
        """A tool with an error in its code."""
        raise KeyError("table")

    kit = ToolKit(
        [add],
        control_tokens=codec.control_tokens,
        protocol=CallProtocol.hermes,
        watched={"add"},
        max_failed_first_calls=2,
    )
    with pytest.raises(ExceptionGroup) as caught:
        await grow(codec, adding_agent, kit=kit, policy=ChatPolicy(codec, call_rate=1))
    assert caught.group_contains(FirstCallsFailedError)


async def test_agent_gets_the_row_of_its_prompt(codec):
    rows = []

    async def reads_the_row(
        prompt, base_url, api_key, data_source, ground_truth, extra_info, seed, attempt, **others
    ):
        body = {"model": "m", "messages": prompt}
        await post(base_url, api_key, "/chat/completions", body)
        rows.append((data_source, ground_truth, extra_info, seed, attempt, others))
        extra_info["environment_kwargs"]["level"] = 9  # a copy: the next attempt does not see it

    row = {
        "data_source": "games",
        "ground_truth": {"moves": ["a", 1]},
        "extra_info": {"index": "u1", "environment_kwargs": {"level": 2}},
        "tools_kwargs": {"add": {"create_kwargs": {"x": 1}}},
    }
    await grow(codec, reads_the_row, prompt=row, group_size=3)
    for source, truth, extra, _, _, others in rows:
        assert (source, truth) == ("games", {"moves": ["a", 1]})
        assert extra["index"] == "u1"
        assert others["environment_kwargs"] == extra["environment_kwargs"]
        assert others["tools_kwargs"] == row["tools_kwargs"]
    assert sorted(attempt for *_, attempt, _ in rows) == [0, 1, 2]
    assert len({seed for _, _, _, seed, _, _ in rows}) == 1
    assert len({others["attempt_id"] for *_, others in rows}) == 3
    assert row["extra_info"]["environment_kwargs"] == {"level": 2}


async def test_row_may_set_the_seed_and_the_configuration_may_replace_a_part_of_the_row(codec):
    seen = []

    async def agent(prompt, base_url, api_key, seed, data_source):
        await post(base_url, api_key, "/chat/completions", {"model": "m", "messages": prompt})
        seen.append((seed, data_source))

    await grow(codec, agent, row={"seed": 7}, options={"data_source": "mine"}, group_size=1)
    assert seen == [(7, "mine")]
    tree = await grow(codec, agent, row={"seed": "seven"}, group_size=1)
    assert "extra_info.environment_kwargs.seed" in tree.trajectories[0].failure_reason


async def test_fork_gets_the_attempt_number_and_the_seed_of_its_root(codec):
    seen = {}

    async def agent(prompt, base_url, api_key, attempt, seed, attempt_id):
        seen[attempt_id] = (attempt, seed)
        return await adding_agent(prompt, base_url, api_key)

    tree = await grow(codec, agent, policy=ChatPolicy(codec, call_rate=0.9), **BRANCHING)
    assert tree.num_forks > 0
    for trajectory in tree.trajectories:
        root = next(item for item in tree.trajectories if item.path == trajectory.path[:1])
        assert seen[trajectory.trajectory_id] == seen[root.trajectory_id]


async def test_fork_that_ends_before_its_parent_forked_is_given_up(codec):
    starts = itertools.count()

    async def ends_early(prompt, base_url, api_key):
        body = {"model": "m", "messages": prompt}
        if next(starts) < BRANCHING["branch"].initial_rollouts:
            return await adding_agent(prompt, base_url, api_key)
        await post(base_url, api_key, "/chat/completions", body)
        return 1.0

    policy = ChatPolicy(codec, call_rate=0.9)
    tree = await grow(codec, ends_early, policy=policy, **BRANCHING)
    assert tree.num_abandoned_forks > 0
    assert tree.num_forks == 0
    assert len(tree.trajectories) == 6
