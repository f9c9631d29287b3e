"""One trajectory over a real chat template with real tools and a scripted policy."""

from __future__ import annotations

import json

from mega_agentrl.config.enums import Branching, CallProtocol
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.tool.function import tool
from mega_agentrl.tool.toolkit import ToolKit
from tests.chat_models import Script
from tests.fakes import FakeRubric, make_context, make_prompt


@tool
async def add(a: int, b: int) -> int:
    """Sum of two numbers."""
    return a + b


@tool
async def page(size: int) -> str:
    """A page of `size` characters."""
    return "z" * size


def call(name="add", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make_kit(codec, *more):
    """Both tools, and more, called by JSON."""
    tools = [add, page, *more]
    return ToolKit(tools, control_tokens=codec.control_tokens, protocol=CallProtocol.hermes)


def prompt_for(codec, kit, **changes):
    """The question, rendered with the schemas of all tools."""
    messages = ({"role": "user", "content": "How much is it?"},)
    schemas = tuple(kit.schemas().values())
    token_ids = tuple(codec.apply_chat_template(messages, schemas))
    values = {"messages": messages, "token_ids": token_ids, "tool_schemas": schemas}
    return make_prompt(**(values | changes))


async def converse(
    codec, turns, *, kit=None, prompt=None, interactions=None, max_model_len=10_000, **options
):
    """The trajectory and the engine that was asked. turns: as `chat_models.Script` takes them."""
    kit, script = kit or make_kit(codec), Script(codec, turns)
    defaults = {
        "group_size": 1,
        "branching": Branching.none,
        "call_protocol": CallProtocol.hermes,
        "max_response_tokens": 4000,
        "max_tool_calls": 8,
    }
    context = make_context(
        RolloutConfig(**(defaults | options)),
        generator=script,
        tools=kit,
        codec=codec,
        max_model_len=max_model_len,
        interactions=interactions,
    )
    prompts = [prompt or prompt_for(codec, kit)]
    (tree,) = await collect_rollouts(prompts, FakeRubric(), context)
    return tree.trajectories[0], script
