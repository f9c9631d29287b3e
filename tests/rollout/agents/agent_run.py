"""Trees that an agent samples through a gateway, and the requests of such agents."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import asynccontextmanager

import aiohttp

from mega_agentrl.config.enums import Branching, CallProtocol
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.agents.agent_loop import AgentLoop
from mega_agentrl.rollout.agents.function import FunctionAgent
from mega_agentrl.rollout.agents.host import AgentHost
from mega_agentrl.rollout.agents.policy_errors import PolicyErrors
from mega_agentrl.rollout.tree import sample_tree
from tests.fakes import make_context
from tests.rollout.chat_run import make_kit, prompt_for
from tests.rollout.gateway.chat_policy import ChatPolicy
from tests.rollout.gateway.gateway_run import open_gateway


async def post(base_url, api_key, path, body):
    headers = {"authorization": f"Bearer {api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{base_url}{path}", json=body) as response,
    ):
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(answer["error"]["code"])
        return answer


async def get_tools(base_url, api_key):
    """The schemas of the run's tools."""
    headers = {"authorization": f"Bearer {api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.get(f"{base_url}/tools") as response,
    ):
        return await response.json()


async def ask(prompt, base_url, api_key):
    body = {"model": "m", "messages": list(prompt)}
    await post(base_url, api_key, "/chat/completions", body)


@asynccontextmanager
async def open_agent_loop(**options):
    """The event loop of agents; it is closed in a thread, since its agents use this loop."""
    with AgentLoop(**options) as loop:
        yield loop
        await asyncio.to_thread(loop.close)


async def grow(
    codec,
    agent,
    *,
    policy=None,
    kit=None,
    options=None,
    timeout_s=300.0,
    max_concurrent=1000,
    policy_errors=(),
    row=None,
    prompt=None,
    **config,
):
    """The tree of one prompt, sampled by an agent, a function or a whole one.

    row: `environment_kwargs` of the prompt. prompt: changes of it.
    """
    kit = kit or make_kit(codec)
    defaults = {
        "group_size": 2,
        "branching": Branching.none,
        "call_protocol": CallProtocol.hermes,
        "max_response_tokens": 3000,
        "max_turns": 12,
        "max_tool_calls": 20,
    }
    async with open_gateway() as gateway, open_agent_loop() as loop:
        if inspect.isfunction(agent):
            agent = FunctionAgent(agent, options or {})
        host = AgentHost(
            agent=agent,
            gateway=gateway,
            loop=loop,
            timeout_s=timeout_s,
            max_concurrent=max_concurrent,
            policy_errors=PolicyErrors(policy_errors),
        )
        context = make_context(
            RolloutConfig(**(defaults | config)),
            generator=policy or ChatPolicy(codec),
            tools=kit,
            codec=codec,
            max_model_len=10_000,
            agents=host,
        )
        changes = {"extra_info": {"environment_kwargs": row or {}}, **(prompt or {})}
        tree = await sample_tree(context, prompt_for(codec, kit, **changes), "p0")
        assert gateway.num_sessions == 0
    return tree
