"""Capture of tokens: what clients do to a history, and that nothing is lost or encoded twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest

from mega_agentrl.batch.packing import pack_trees
from mega_agentrl.rollout.gateway.chat import AnswerFinish, ChatRequest
from mega_agentrl.rollout.gateway.session import AgentSession, Probe
from mega_agentrl.types.records import (
    FinishReason,
    RolloutTree,
    Score,
    StopReason,
    ToolCall,
    Trajectory,
)
from tests.chat_models import Script
from tests.rollout.chat_run import call
from tests.rollout.gateway.chat_policy import ChatPolicy
from tests.rollout.gateway.gateway_run import make_session_scope

QUESTION = {"role": "user", "content": "How much is it?"}


def assistant(answer):
    """The message of an answer as a plain client keeps it."""
    calls = tuple(item for _, item in answer.tool_calls)
    message = {"role": "assistant", "content": answer.content}
    return message | ({"tool_calls": calls} if calls else {})


async def ask(session, messages, **options):
    tools = session.scope.prompt.tool_schemas
    request = ChatRequest(messages=tuple(messages), tools=tools, options={}, **options)
    return await complete(session, request)


async def complete(session, request, **options):
    _, answering = await session.admit(lambda: request, 0, **options)
    return await answering


def trajectory_of(session):
    """The trajectory that the session trains."""
    response = session.build_response()
    return Trajectory(
        trajectory_id=session.scope.trajectory_id,
        prompt=session.scope.prompt,
        path=session.scope.path,
        stop_reason=StopReason.eos,
        context_resets=response.context_resets,
        score=Score(value=1.0, correct=True, f1=1.0, answer="", reason=""),
        **response.token_buffer.record_fields(),
    )


def sampled_turns(trajectory):
    """Number of times that the trajectory trains each sampled turn, by context and tokens."""
    found = Counter()
    contexts = [(0, trajectory.prompt.token_ids)]
    contexts += [(reset.start, reset.token_ids) for reset in trajectory.context_resets]
    for turn in trajectory.turns:
        if turn.outcome is not None:
            continue
        start, context = [item for item in contexts if item[0] <= turn.start][-1]
        before = (*context, *trajectory.token_ids[start : turn.start])
        tokens = tuple(trajectory.token_ids[turn.start : turn.stop])
        assert trajectory.loss_mask[turn.start : turn.stop] == [1] * len(tokens)
        found[before, tokens] += 1
    return found


# Each changes a message of the assistant in a way that a client may, without changing its meaning.
CLIENT_CHANGES = {
    "as parts": lambda m: m | {"content": [{"type": "text", "text": m["content"]}]},
    "with white space": lambda m: m | {"content": f"\n {m['content']} \r\n"},
    "with reasoning in the text": lambda m: (
        m | {"content": f"<think>in short</think>{m['content']}"}
    ),
    "with other numbers": lambda m: (
        m
        | {
            "tool_calls": tuple(
                ToolCall(tool=item.tool, arguments={k: float(v) for k, v in item.arguments.items()})
                for item in m.get("tool_calls", ())
            )
        }
    ),
    "with other key order": lambda m: (
        m
        | {
            "tool_calls": tuple(
                ToolCall(tool=item.tool, arguments=dict(reversed(item.arguments.items())))
                for item in m.get("tool_calls", ())
            )
        }
    ),
}


@pytest.mark.parametrize("change", CLIENT_CHANGES.values(), ids=CLIENT_CHANGES)
async def test_history_that_a_client_rewrote_continues_with_the_sampled_ids(codec, change):
    turns = [f"<think>long</think>Let me add. {call(a=1, b=2)}", "It is 3."]
    script = Script(codec, turns)
    session = AgentSession(make_session_scope(codec, script))
    first = await ask(session, [QUESTION])
    tool = {"role": "tool", "content": "3"}
    await ask(session, [QUESTION, change(assistant(first)), tool])
    before, after = (request.token_ids for request in script.requests)
    sampled = (*codec.encode(turns[0]), codec.eos_id)
    assert after[: len(before) + len(sampled)] == before + sampled
    assert len(session.tree.roots) == 1
    assert session.build_response().context_resets == ()


async def test_branches_that_clients_begin_are_counted(codec):
    session = AgentSession(make_session_scope(codec, Script(codec, ["One."] * 9)))
    more = {"role": "user", "content": "More."}
    first = assistant(await ask(session, [QUESTION]))
    await ask(session, [QUESTION])  # another sample of the same turn is no branch
    await ask(session, [QUESTION, first, more])
    assert session.tree.num_branches == 0
    await ask(session, [QUESTION, first, {"role": "user", "content": "Less."}])
    assert session.tree.num_branches == 1
    await ask(session, [QUESTION, {"role": "assistant", "content": "Two."}, more])
    assert session.tree.num_branches == 2
    await ask(session, [{"role": "user", "content": "Summary."}])
    assert session.tree.num_branches == 3


async def test_compaction_begins_a_branch_and_reuses_the_ids_of_answers_it_keeps(codec):
    turns = [f"<think>a</think>First. {call(a=1, b=2)}", f"Second. {call(a=3, b=4)}", "It is 7."]
    script = Script(codec, turns)
    session = AgentSession(make_session_scope(codec, script))
    messages = [QUESTION]
    for result in ("3", "7"):
        messages += [assistant(await ask(session, messages)), {"role": "tool", "content": result}]
    summary = {"role": "user", "content": "So far: 1 + 2 is 3."}
    await ask(session, [summary, *messages[-2:]])
    second = (*codec.encode(turns[1]), codec.eos_id)
    assert _contains(script.requests[2].token_ids, second)
    trajectory = trajectory_of(session)
    (reset,) = trajectory.context_resets
    assert reset.token_ids == script.requests[2].token_ids
    assert sum(sampled_turns(trajectory).values()) == 3


def _contains(sequence, part):
    return any(sequence[i : i + len(part)] == part for i in range(len(sequence)))


async def test_sub_agents_share_nothing_and_the_main_conversation_goes_on(codec):
    script = Script(codec, ["Main 1.", "Sub 1.", "Main 2.", "Sub 2.", "Main 3."])
    session = AgentSession(make_session_scope(codec, script))
    main = [QUESTION]
    sub = [{"role": "system", "content": "You check."}, {"role": "user", "content": "Is it so?"}]
    for messages in (main, sub, main, sub, main):
        answer = await ask(session, messages)
        messages += [assistant(answer), {"role": "user", "content": "Go on."}]
    trajectory = trajectory_of(session)
    # Depth first: the branch of the sub-agent as a whole, then that of the latest answer.
    texts = [turn.text for turn in trajectory.turns if turn.outcome is None]
    assert texts == ["Sub 1.", "Sub 2.", "Main 1.", "Main 2.", "Main 3."]
    assert [reset.start for reset in trajectory.context_resets] == [
        0,
        trajectory.turns[3].start,
    ]


async def test_eight_rollouts_whose_reasoning_is_dropped_train_as_eight_rows(codec):
    """The shape of slime#2288, where false forks made 64 samples of 8 rollouts."""
    trajectories = []
    for _ in range(8):
        turns = [f"<think>{i}</think>Step {i}. {call(a=i, b=1)}" for i in range(7)] + ["It is 8."]
        session = AgentSession(make_session_scope(codec, Script(codec, turns)))
        messages = [QUESTION]
        for number in range(8):
            answer = await ask(session, messages)
            messages.append(assistant(answer))
            messages.append({"role": "tool", "content": str(number + 1)})
        trajectories.append(trajectory_of(session))
    tree = RolloutTree(prompt=trajectories[0].prompt, trajectories=trajectories)
    assert len(pack_trees([tree]).mask_BT) == 8


class FuzzedAgent:
    """A client that does what clients do: retries, compaction, sub-agents, rewritten histories."""

    def __init__(self, session, rng):
        self.num_calls = 0
        self._session = session
        self._rng = rng

    async def converse(self, messages, num_turns, depth=0):
        """Run one conversation, with sub-agents beside it."""
        rng = self._rng
        for _ in range(num_turns):
            sent = [self._rewrite(message) for message in messages]
            self.num_calls += 1
            request = ChatRequest(messages=tuple(sent), options={})
            answer = await complete(self._session, request)
            if rng.random() < 0.1:  # the client lost the answer
                self.num_calls += 1
                num_reused = self._session.num_reused_answers
                answer = await complete(self._session, request, is_retry=True)
                assert self._session.num_reused_answers > num_reused
            self._session.mark_delivered(answer)
            if rng.random() < 0.1:  # the client wants another answer
                self.num_calls += 1
                answer = await complete(self._session, request, is_retry=rng.random() < 0.5)
            messages.append(assistant(answer))
            for index, _ in enumerate(answer.tool_calls):
                messages.append({"role": "tool", "content": f"{rng.random():.3f} {index}"})
            if not answer.tool_calls:
                messages.append({"role": "user", "content": rng.choice(("Go on.", "And then?"))})
            if depth == 0 and rng.random() < 0.08:
                subs = [self._start_sub_agent(depth) for _ in range(rng.randint(1, 3))]
                await asyncio.gather(*subs)
            if rng.random() < 0.05:
                kept = messages[-2:] if messages[-2]["role"] == "assistant" else []
                messages[:] = [{"role": "user", "content": f"Summary {rng.random()}"}, *kept]

    async def _start_sub_agent(self, depth):
        task = [
            {"role": "system", "content": f"Sub-agent {self._rng.randint(0, 3)}."},
            {"role": "user", "content": f"Task {self._rng.randint(0, 3)}."},
        ]
        await self.converse(task, self._rng.randint(1, 4), depth + 1)

    def _rewrite(self, message):
        if message["role"] == "assistant" and self._rng.random() < 0.5:
            return self._rng.choice(list(CLIENT_CHANGES.values()))(message)
        if message["role"] == "system" and self._rng.random() < 0.5:
            return message | {"role": "developer"}
        return dict(message)


async def fuzz(codec, num_calls, seed):
    """Run sessions until this many calls were made, and check each one."""
    rng = random.Random(seed)
    num_done = 0
    while num_done < num_calls:
        num_done += await fuzz_session(codec, rng)
    return num_done


async def fuzz_session(codec, rng):
    """Run one session and return the number of its calls."""
    policy = ChatPolicy(codec)
    limits = {"max_response_tokens": 60_000, "max_turns": 10_000, "max_tool_calls": 10_000}
    scope = make_session_scope(codec, policy, max_model_len=60_000, **limits)
    session = AgentSession(scope)
    encoded = Counter()
    encode_assistant = session.encoder.encode_assistant
    session.encoder.encode_assistant = lambda *args: (
        encoded.update(["assistant"]) or encode_assistant(*args)
    )
    agent = FuzzedAgent(session, rng)
    await agent.converse([QUESTION], rng.randint(5, 60))
    await session.close()
    trajectory = trajectory_of(session)
    assert sampled_turns(trajectory) == policy.sampled
    assert not encoded, "a sampled message was tokenized again"
    assert sum(trajectory.loss_mask) == sum(
        len(tokens) * count for (_, tokens), count in policy.sampled.items()
    )
    return agent.num_calls


async def test_random_clients_lose_no_token_and_encode_none_twice(codec):
    await fuzz(codec, 600, seed=1)


@pytest.mark.slow(75)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 6))
async def test_random_clients_lose_no_token_in_four_times_25_000_calls(codec, seed):
    assert await fuzz(codec, 25_000, seed=seed) >= 25_000


class HeldEngine(Script):
    """An engine that runs its second request until it is aborted."""

    def __init__(self, codec, turns):
        super().__init__(codec, turns)
        self.aborted = {}

    async def generate(self, request):
        generation = await super().generate(request)
        if len(self.requests) != 2:
            return generation
        await self.aborted.setdefault(request.request_id, asyncio.Event()).wait()
        return replace(generation, finish_reason=FinishReason.aborted)

    async def abort(self, request_id):
        if request_id in self.aborted:
            self.aborted[request_id].set()


async def test_closing_keeps_the_tokens_of_both_pieces_of_a_turn_with_a_probe(codec):
    async def ignore(*args):
        pass

    engine = HeldEngine(codec, ["so it is 5", " and more"])
    probe = Probe(num_tokens=lambda session, block: 3, on_sampled=ignore)
    session = AgentSession(replace(make_session_scope(codec, engine), probe=probe))
    asking = asyncio.create_task(ask(session, [QUESTION]))
    while not engine.aborted and not asking.done():
        await asyncio.sleep(0)
    await session.close()
    await asking
    first, second = engine.requests
    num_first = len(second.token_ids) - len(first.token_ids)
    trajectory = trajectory_of(session)
    assert tuple(trajectory.token_ids[:num_first]) == second.token_ids[-num_first:]
    assert sum(trajectory.loss_mask) > num_first == 3


async def test_session_that_closes_while_the_forks_are_made_samples_no_more(codec):
    engine = Script(codec, ["so it is 5"])

    async def close(session, block, generation):
        session.is_closed = True

    probe = Probe(num_tokens=lambda session, block: 3, on_sampled=close)
    session = AgentSession(replace(make_session_scope(codec, engine), probe=probe))
    await ask(session, [QUESTION])
    assert sum(trajectory_of(session).loss_mask) == 3


class LockstepEngine(Script):
    """Sends its answers when all of its turns have been asked for."""

    async def generate(self, request):
        generation = await super().generate(request)
        while len(self.requests) < len(self._turns):
            await asyncio.sleep(0)
        num_tokens = len(generation.token_ids)
        versions = tuple(range(1, num_tokens + 1))
        return replace(generation, version=num_tokens, versions=versions)


@pytest.mark.parametrize(("spare", "num_kept"), [(2, [9, 2, 0]), (0, [9, 0, 0]), (18, [9] * 3)])
async def test_requests_that_run_at_once_share_the_tokens_that_are_left(codec, spare, num_kept):
    turn = "so it is"
    num_turn = len(codec.encode(turn)) + 1
    assert num_turn == 9
    session = AgentSession(
        make_session_scope(
            codec, LockstepEngine(codec, [turn] * 3), max_response_tokens=num_turn + spare
        )
    )
    # Each begins a conversation: only what is sampled counts as response.
    questions = [[{"role": "user", "content": f"{number}?"}] for number in range(3)]
    answers = await asyncio.gather(*(ask(session, messages) for messages in questions))

    answers.sort(key=lambda answer: answer.num_answer_tokens, reverse=True)
    assert [answer.num_answer_tokens for answer in answers] == num_kept
    for answer, kept in zip(answers, num_kept, strict=True):
        expected = AnswerFinish.stop if kept == num_turn else AnswerFinish.length
        assert answer.finish is expected
    assert session.tree.num_response_tokens == sum(num_kept)
    trajectory = trajectory_of(session)
    assert sum(trajectory.loss_mask) == sum(num_kept)
    sampled = [v for v, m in zip(trajectory.versions, trajectory.loss_mask, strict=True) if m]
    assert sorted(sampled) == sorted(v for kept in num_kept for v in range(1, kept + 1))
    if spare < 18:
        assert session.limit_reached is StopReason.length
