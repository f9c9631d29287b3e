"""Routes of the contexts of an agent's session."""

from __future__ import annotations

from mega_agentrl.rollout.gateway.session import AgentSession
from mega_agentrl.types.records import RolloutTree
from tests.chat_models import Script
from tests.rollout.chat_run import call
from tests.rollout.gateway.gateway_run import make_session_scope
from tests.rollout.gateway.test_capture import QUESTION, ask, assistant, trajectory_of
from tests.rollout.routed_engine import RoutedEngine, check_routes


async def test_an_agent_that_compacts_its_history_has_routes_in_each_context(codec):
    turns = [f"<think>a</think>First. {call(a=1, b=2)}", f"Second. {call(a=3, b=4)}", "It is 7."]
    scope = make_session_scope(codec, RoutedEngine(Script(codec, turns)), with_routes=True)
    session = AgentSession(scope)
    messages = [QUESTION]
    for result in ("3", "7"):
        messages += [assistant(await ask(session, messages)), {"role": "tool", "content": result}]
    await ask(session, [{"role": "user", "content": "So far: 1 + 2 is 3."}, *messages[-2:]])
    check_agent(session, num_resets=1)


async def test_sub_agents_have_routes_in_their_own_contexts(codec):
    script = Script(codec, ["Main 1.", "Sub 1.", "Main 2.", "Sub 2.", "Main 3."])
    session = AgentSession(make_session_scope(codec, RoutedEngine(script), with_routes=True))
    main = [QUESTION]
    sub = [{"role": "system", "content": "You check."}, {"role": "user", "content": "Is it so?"}]
    for messages in (main, sub, main, sub, main):
        answer = await ask(session, messages)
        messages += [assistant(answer), {"role": "user", "content": "Go on."}]
    check_agent(session, num_resets=2)


def check_agent(session, num_resets):
    trajectory = trajectory_of(session)
    assert len(trajectory.context_resets) == num_resets
    tree = RolloutTree(prompt=trajectory.prompt, trajectories=[trajectory])
    num_sampled = sum(trajectory.loss_mask)
    assert check_routes([tree]) > num_sampled
