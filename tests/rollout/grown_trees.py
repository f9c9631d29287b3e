"""Scored rollout trees of the scripted engine: random ones, and one by hand."""

from __future__ import annotations

import asyncio
from itertools import islice

from hypothesis import strategies as st

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.schema import BranchConfig, RolloutConfig
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.types.records import ToolStatus
from tests.fakes import (
    EOS,
    CharCodec,
    FakeGenerator,
    FakeRubric,
    FakeTools,
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


def grow(config, *, seed=1, generator=None, tools=None, num_prompts=1):
    """Trees of prompts ``set/0``, ``set/1``, ..., scored."""
    prompts = [
        make_prompt(f"set/{i}", "Q", extra_info={"index": i}, tools_kwargs={"python": {"a": [1]}})
        for i in range(num_prompts)
    ]
    return run_virtually(
        asyncio.wait_for(
            collect_rollouts(
                prompts,
                generator=generator or FakeGenerator(),
                tools=tools or FakeTools(),
                codec=CharCodec(),
                rubric=FakeRubric(),
                config=config,
                max_model_len=140,
                seed=seed,
                step=0,
            ),
            20,
        )
    )


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


def nested_tree(*, after=2.0):
    """One root with 3 slots; entropy 1 before the first answer, `after` behind it.

    Where that is more, the paths are 0, 0.0, 0.0.0 and 0.1.
    """
    writes = turns("thinkhard" + CALL, "more words" + CALL, "more words" + END)
    entropy = lambda response, request: after if "</result>" in response else 1.0  # noqa: E731
    config = RolloutConfig(
        branch=BranchConfig(num_probe_tokens=8, initial_rollouts=1),
        max_response_tokens=130,
        group_size=4,
    )
    (tree,) = grow(config, generator=FakeGenerator(writes, entropy=entropy))
    return tree
