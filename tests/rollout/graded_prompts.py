"""Prompts whose groups turn out as their first letter says, and a source that records acks.

M mixed: every other root is correct. E easy: all are. H hard: none is. Each trajectory makes a call
before it answers; the call of a prompt with S behind the letter names the tool `slow`.
"""

from __future__ import annotations

import asyncio

from mega_agentrl.config.enums import Branching, FilterMetric, PromptOrder
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.data.prompt_sampler import PromptSampler
from mega_agentrl.rollout.groups.batch_collector import RolloutCollector
from tests.fakes import EOS, FakeGenerator, FakeRubric, FakeTools, make_context, make_prompt
from tests.rollout.virtual_time import run_virtually


def make_prompts(kinds):
    """A prompt per kind, in order: p0, p1, ..."""
    return [make_prompt(f"p{index}", question=kind) for index, kind in enumerate(kinds)]


def write(response, request):
    """What the engine writes."""
    kind = "".join(map(chr, request.token_ids)).partition("?")[0]
    root = int(request.request_id.split("/")[2].split(".")[0])
    right = kind[0] == "E" or (kind[0] == "M" and root % 2 == 0)
    call = "<python>slow</python>" if "S" in kind else "<python>1</python>"
    texts = (f"let me see {call}", f"so <answer>{int(right)}</answer>{EOS}")
    *results, spoken = response.split("</result>")
    return texts[len(results)][len(spoken) :]


class SlowTools(FakeTools):
    """Answers calls with the argument `slow` when `gate` is set, and not before."""

    def __post_init__(self):
        super().__post_init__()
        self.gate = asyncio.Event()

    def open_session(self):
        session = super().open_session()
        execute = session.execute

        async def wait(tool, arguments):
            if arguments["text"] == "slow":
                await self.gate.wait()
            return await execute(tool, arguments)

        session.execute = wait
        return session


class RecordingPromptSource(PromptSampler):
    """Gives the prompts in order, and records their acks and nacks."""

    def __init__(self, prompts):
        super().__init__(prompts, seed=0, order=PromptOrder.file)
        self.acked, self.nacked = [], []

    def ack(self, prompts):
        super().ack(prompts)
        self.acked += [prompt.prompt_id for prompt in prompts]

    def nack(self, prompts):
        super().nack(prompts)
        self.nacked += [prompt.prompt_id for prompt in prompts]


def filtered_config(**changes):
    """Four independent roots a group, filtered by accuracy."""
    values = {
        "group_size": 4,
        "branching": Branching.none,
        "max_response_tokens": 120,
        "filter_metric": FilterMetric.accuracy,
    }
    return RolloutConfig(**(values | changes))


def make_collector(source, config, generator, tools, *, num_groups, rubric=None):
    """A collector over scripted ports."""
    context = make_context(config, generator=generator, tools=tools)
    return RolloutCollector(source, context, rubric or FakeRubric(), num_groups=num_groups)


def names(trees):
    """Ids of the trees' prompts."""
    return [tree.prompt.prompt_id for tree in trees]


def run(scenario):
    """Run it; afterwards no task may be left on its loop."""

    async def checked():
        result = await asyncio.wait_for(scenario, 20)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, others
        return result

    return run_virtually(checked())


async def collect_steps(kinds, config, num_groups, *, num_steps=1, generator=None, tools=None):
    """Some steps with fresh ports: what each collected, and the source."""
    source = RecordingPromptSource(make_prompts(kinds))
    tools = tools or FakeTools()
    generator = generator or FakeGenerator(write)
    groups = make_collector(source, config, generator, tools, num_groups=num_groups)
    results = [await groups.collect(step) for step in range(num_steps)]
    await groups.close()
    assert all(session.released == 1 for session in tools.sessions)
    return results, source
