"""A gateway on the loopback interface over a real chat template and a scripted policy."""

from __future__ import annotations

from contextlib import asynccontextmanager

from mega_agentrl.config.enums import Branching, CallProtocol
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.gateway.server import Gateway
from mega_agentrl.rollout.gateway.session import SessionScope
from mega_agentrl.rollout.gateway.settings import GatewaySettings
from mega_agentrl.rollout.gateway.tools import SessionTools
from mega_agentrl.rollout.tracing import TrajectorySpans
from tests.chat_models import Script
from tests.fakes import make_context
from tests.rollout.chat_run import make_kit, prompt_for


def make_session_scope(
    codec,
    generator,
    *,
    kit=None,
    images=None,
    max_model_len=10_000,
    with_routes=False,
    **options,
):
    """The scope of a root over real tools and a template; `options` are of `rollout.*`."""
    kit = kit or make_kit(codec)
    defaults = {
        "branching": Branching.none,
        "call_protocol": CallProtocol.hermes,
        "max_response_tokens": 4000,
        "max_turns": 100,
        "max_tool_calls": 100,
    }
    context = make_context(
        RolloutConfig(**(defaults | options)),
        generator=generator,
        tools=kit,
        codec=codec,
        max_model_len=max_model_len,
        images=images,
        with_routes=with_routes,
    )
    prompt = prompt_for(codec, kit)
    spans = TrajectorySpans(None, prompt, "p0/0/0", 0, None)
    return SessionScope(
        context=context,
        prompt=prompt,
        prompt_key="p0",
        path=(0,),
        spans=spans,
        tools=SessionTools(context, prompt, spans),
    )


@asynccontextmanager
async def open_gateway(**settings):
    """A gateway that listens."""
    gateway = Gateway(GatewaySettings(**settings))
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.close()


@asynccontextmanager
async def open_scripted_session(codec, turns, **options):
    """Base URL without a path, key, session and engine of a session with scripted turns."""
    script = Script(codec, turns)
    async with open_gateway() as gateway:
        key, session = gateway.open_session(make_session_scope(codec, script, **options))
        yield gateway.url, key, session, script
        await gateway.close_session(key)


def sampled_text(codec, session):
    """Decoded text of all tokens with loss mask 1."""
    buffer = session.build_response().token_buffer
    pairs = zip(buffer.token_ids, buffer.loss_mask, strict=True)
    return codec.decode([token for token, mask in pairs if mask])


def check_one_context(codec, session, turns):
    """All turns continue each other: nothing was encoded again, lost or counted twice."""
    assert len(session.tree.roots) == 1
    blocks = [session.tree.roots[0]]
    while blocks[-1].continuations:
        (block,) = blocks[-1].continuations
        blocks.append(block)
    assert [block.is_sampled for block in blocks] == [False, True] * len(turns)
    # Before the first token there is one, because the client's tools are not the prompt's.
    assert [reset.start for reset in session.build_response().context_resets] == [0]
    assert sampled_text(codec, session) == "".join(turns)
