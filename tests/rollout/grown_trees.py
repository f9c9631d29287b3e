"""Scored rollout trees of the scripted engine: random ones, and one by hand."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from itertools import islice

from hypothesis import assume
from hypothesis import strategies as st

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.types.records import Role, ToolStatus
from tests.fakes import (
    EOS,
    FakeGenerator,
    FakeRubric,
    FakeTools,
    make_context,
    make_prompt,
    random_text,
    turns,
    unit,
)
from tests.rollout.virtual_time import run_virtually

CALL = "<search>q1</search>"
END = f"<answer>1</answer>{EOS}"

configs = st.builds(
    RolloutConfig,
    group_size=st.integers(1, 9).map(lambda number: 10 - number),
    branching=st.sampled_from(
        [Branching.after_result, Branching.aepo, Branching.released, Branching.none]
    ),
    branch=st.builds(
        BranchConfig,
        num_probe_tokens=st.integers(1, 12),
        num_forks_per_decision=st.integers(1, 3),
        initial_rollouts=st.sampled_from([1, None]),
    ),
    max_response_tokens=st.integers(0, 149).map(lambda number: 150 - number),
    max_turns=st.integers(1, 5).map(lambda number: 6 - number),
    max_tool_calls=st.integers(0, 3).map(lambda number: 3 - number),
)


def grow(config, *, seed=1, generator=None, tools=None, num_prompts=1, **options):
    """Trees of prompts ``set/0``, ``set/1``, ..., scored."""
    prompts = [
        make_prompt(f"set/{i}", "Q", extra_info={"index": i}, tools_kwargs={"python": {"a": [1]}})
        for i in range(num_prompts)
    ]
    context = make_context(
        config,
        generator=generator or FakeGenerator(),
        tools=tools or FakeTools(),
        max_model_len=140,
        seed=seed,
        **options,
    )
    work = collect_rollouts(prompts, FakeRubric(), context)
    return run_virtually(asyncio.wait_for(work, 20))


def _talkative(response, request):
    """The random language, but a text may not end before it has used a tool."""
    text = "".join(islice(random_text(response, request), 160))
    return text if "</result>" in response else text.replace(f"<answer>1</answer>{EOS}", CALL)


@st.composite
def grown(draw, *, rounds=True):
    """A tree of any configuration, engine and tools with faults of their own.

    Written so that the simplest choice has forks, and most others too. rounds: with those of
    lock-step ARPO, whose decisions are about another entropy.
    """
    config = draw(configs.filter(lambda one: rounds or one.branching is not Branching.released))
    rise = draw(st.sampled_from([1.0, 0.0]))
    seed, share = draw(st.integers(0, 10_000)), draw(st.sampled_from([0, 0, 0.1]))
    bad = draw(st.sampled_from([ToolStatus.ok, ToolStatus.ok, ToolStatus.infra_error]))
    generator = FakeGenerator(
        write=_talkative,
        entropy=lambda response, request: (
            3 * unit(response, request.seed) + rise * ("</result>" in response)
        ),
        breaks=lambda request: request.seed % 1000 < 1000 * share,
    )
    tools = FakeTools(status=lambda text: bad if text == "q2" else ToolStatus.ok)
    (tree,) = grow(config, seed=seed, generator=generator, tools=tools)
    return tree


@st.composite
def parted(draw):
    """A grown tree in which more paths leave others, each inside of an assistant turn.

    The scripted engine never makes such forks.
    """
    tree = draw(grown())
    for _ in range(draw(st.integers(1, 3))):
        spots = [
            (one, turn)
            for one in tree.trajectories
            for turn in one.turns
            if turn.role is Role.assistant and turn.stop > max(turn.start, one.fork_len)
        ]
        assume(spots)
        one, turn = draw(st.sampled_from(spots))
        position = draw(st.integers(max(turn.start + 1, one.fork_len), turn.stop))
        tree = part(tree, one, turn, position, num_new=draw(st.integers(0, 3)))
    return tree


def part(tree, one, turn, position, *, num_new):
    """The tree with one more path: it leaves `one` inside of `turn` and adds `num_new` tokens."""
    num_forks = sum(other.path[:-1] == one.path for other in tree.trajectories)
    path = (*one.path, num_forks)
    new = [num_new + number for number in range(num_new)]
    size = position + num_new
    fork = replace(
        one,
        trajectory_id=f"{one.trajectory_id}.{num_forks}",
        path=path,
        parent_id=one.trajectory_id,
        fork_len=position,
        token_ids=[*one.token_ids[:position], *new],
        loss_mask=[*one.loss_mask[:position], *[1] * num_new],
        logps=[*one.logps[:position], *[-0.25] * num_new],
        entropies=[*one.entropies[:position], *[0.125] * num_new],
        versions=[*one.versions[:position], *[1] * num_new],
        turn_ids=[*one.turn_ids[:position], *[turn.index] * num_new],
        turns=[*one.turns[: turn.index], replace(turn, stop=size, text=f"part {path}")],
        argmax_ids=one.argmax_ids[:position] + array("i", new if one.argmax_ids else ()),
        decisions=[],
    )
    paths = sorted([*tree.trajectories, fork], key=lambda other: other.path)
    return replace(tree, trajectories=paths, num_forks=tree.num_forks + 1)


def entropy_levels(before, after):
    """The entropy of an engine: `before` up to the first tool answer, `after` behind it."""
    return lambda response, request: after if "</result>" in response else before


def nested_tree(*, after=2.0):
    """One root with 3 slots; entropy 1 before the first answer, `after` behind it.

    Where that is more, the paths are 0, 0.0, 0.0.0 and 0.1.
    """
    writes = turns("thinkhard" + CALL, "more words" + CALL, "more words" + END)
    config = RolloutConfig(
        branch=BranchConfig(num_probe_tokens=8, initial_rollouts=1),
        max_response_tokens=130,
        group_size=4,
    )
    (tree,) = grow(config, generator=FakeGenerator(writes, entropy=entropy_levels(1.0, after)))
    return tree


def find_fork_decision(tree, path):
    """The decision that made `path`; None for a root, or if no decisions were recorded."""
    by_path = {one.path: one for one in tree.trajectories}
    if by_path[path].parent_id is None:
        return None
    made = [one for one in by_path[path[:-1]].decisions for _ in range(one.num_forks)]
    return made[path[-1]] if path[-1] < len(made) else None
