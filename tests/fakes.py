"""Deterministic fakes of the protocols in `types.protocols`: an engine, tools, a codec, a rubric.

One token is one character, its id the code point; id 0 ends a turn. A prompt ends in ``?``; what
follows is the response. The engine writes what `write(response, request)` returns, up to a stop
string or `max_tokens`. `random_text` writes a random language of words, tool calls and answers
that depends on the request's seed alone.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.rollout.branching.policy import BranchPolicy
from mega_agentrl.rollout.context import RolloutContext, make_rollout_context
from mega_agentrl.types.errors import ToolSessionError
from mega_agentrl.types.records import (
    FinishReason,
    Generation,
    Prompt,
    Role,
    RolloutTree,
    Score,
    StopReason,
    ToolCall,
    ToolOutcome,
    ToolStatus,
    Trajectory,
    Turn,
)

EOS = "\0"
CALL = re.compile(r"<(search|python)>([^<]*)</\1>$")
OUTCOME = ToolOutcome(tool="python", status=ToolStatus.ok, answer="2", latency_s=0.5)
ITEMS = ("a", "b", "c d", "<search>q1</search>", "<python>q2</python>", f"<answer>1</answer>{EOS}")


def make_prompt(name: str = "p0", question: str = "Q", **changes) -> Prompt:
    """A prompt whose token ids are the question and ``?``."""
    values = {
        "prompt_id": name,
        "data_source": "fake",
        "messages": ({"role": "user", "content": question},),
        "ground_truth": "1",
        "token_ids": tuple(map(ord, question + "?")),
    }
    return Prompt(**(values | changes))


def make_trajectory(path=(0,), spans=(), *, outcomes=(), **changes) -> Trajectory:
    """A trajectory that ended by itself and has no score.

    spans: role and number of tokens of each turn. outcomes: of the turns of tools and users, in
    order; by default `OUTCOME`.
    """
    turns, loss_mask, turn_ids, told = [], [], [], iter(outcomes)
    for index, (role, size) in enumerate(spans):
        start, sampled = len(loss_mask), role is Role.assistant
        loss_mask += [int(sampled)] * size
        turn_ids += [index] * size
        outcome = None if sampled else next(told, OUTCOME)
        turn = Turn(
            index=index, role=role, start=start, stop=start + size, text="t", outcome=outcome
        )
        turns.append(turn)
    size = len(loss_mask)
    values = {
        "trajectory_id": "/".join(map(str, path)),
        "prompt": make_prompt(),
        "path": path,
        "token_ids": [1] * size,
        "loss_mask": loss_mask,
        "logps": [0.0] * size,
        "entropies": [0.0] * size,
        "versions": [1] * size,
        "turn_ids": turn_ids,
        "turns": turns,
        "stop_reason": StopReason.eos,
    }
    return Trajectory(**(values | changes))


def make_scored_tree(*rewards: float | None, spans=(), **changes) -> RolloutTree:
    """A tree of roots with these rewards, correct where at least 1; None is a failed root."""
    trajectories = []
    for index, value in enumerate(rewards):
        ended = {"stop_reason": StopReason.aborted}
        if value is not None:
            score = Score(value=value, correct=value >= 1, f1=0.0, answer="", reason="")
            ended = {"score": score}
        trajectories.append(make_trajectory((index,), spans, **ended, **changes))
    return RolloutTree(prompt=make_prompt(), trajectories=trajectories)


def unit(*parts: object) -> float:
    """Hash the parts to a number in [0, 1)."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=6).digest(), "big") / 2**48


def make_context(
    config: RolloutConfig | None = None, *, policy: BranchPolicy | None = None, **changes
) -> RolloutContext:
    """A context over the fakes. policy: in place of the one of `config`."""
    values = {
        "generator": FakeGenerator(),
        "tools": FakeTools(),
        "codec": CharCodec(),
        "config": config or RolloutConfig(),
        "max_model_len": 500,
        "seed": 1,
        "step": 0,
    }
    context = make_rollout_context(**(values | changes))
    return context if policy is None else replace(context, policy=policy)


class CharCodec:
    """Characters as ids; the end of a turn decodes to nothing."""

    eos_id = 0
    vocab_size = 130

    def encode(self, text):
        return [ord(char) for char in text]

    def decode(self, token_ids):
        return "".join(chr(token) for token in token_ids if token)


def random_text(response: str, request) -> Iterator[str]:
    """Write an endless turn of `ITEMS`, drawn from the seed."""
    begun = max((i for i in ITEMS if _ends_in(response, i)), key=len, default="")
    text = response
    yield from begun[_ends_in(response, begun) :]
    while True:
        item = ITEMS[int(unit(request.seed, len(text)) ** 1.5 * len(ITEMS))]
        yield from item
        text += item


def _ends_in(text: str, item: str) -> int:
    """Return the length of the longest proper prefix of a tag item that the text ends in."""
    if not item.startswith("<"):
        return 0
    return max((n for n in range(1, len(item)) if text.endswith(item[:n])), default=0)


def turns(*texts: str) -> Callable:
    """Write the given turns in order; tool answers end in ``</result>``."""

    def write(response, request):
        *results, written = response.split("</result>")
        return texts[len(results)][len(written) :]

    return write


@dataclass
class FakeGenerator:
    """An engine that writes the text of `write`."""

    write: Callable = random_text
    """write(response, request): iterable of the characters that follow the response."""
    entropy: Callable = lambda response, request: 3 * unit(response, request.seed)
    """entropy(response, request): entropy of the last token of the response, nats."""
    delays: int | None = None
    """Seed of random waits; None disables them."""
    breaks: Callable = lambda request: False
    """breaks(request): whether the engine dies on the request."""
    version: int = 1
    can_serve: bool = True
    requests: list = field(default_factory=list)
    aborted: list = field(default_factory=list)
    running: set = field(default_factory=set)

    def __post_init__(self):
        self._waits = random.Random(self.delays)

    async def generate(self, request):
        assert request.request_id not in self.running
        assert request.max_tokens >= 1
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            if self.delays is not None:
                await asyncio.sleep(self._waits.random() * 0.002)
            if self.breaks(request):
                raise RuntimeError("engine 0 died")
            return self._finish(request)
        finally:
            self.running.discard(request.request_id)

    def _finish(self, request):
        before = "".join(map(chr, request.token_ids)).partition("?")[2]
        text, entropies, finish, stopped = "", [], FinishReason.length, None
        for char in self.write(before, request):
            text += char
            entropies.append(self.entropy(before + text, request))
            stopped = next((stop for stop in request.stop if text.endswith(stop)), None)
            if char == EOS or stopped:
                finish = FinishReason.eos if char == EOS else FinishReason.stop
                break
            if len(text) == request.max_tokens:
                break
        token_ids = tuple(map(ord, text))
        return Generation(
            request_id=request.request_id,
            token_ids=token_ids,
            logps=tuple(-unit(request.seed, i) for i in range(len(text))),
            entropies=tuple(entropies),
            argmax_ids=token_ids,
            finish_reason=finish,
            stop_string=stopped,
            version=self.version,
            # -p ln p of this alternative rises with the entropy.
            top_logps=tuple(
                (-1 - 1 / (value + 0.1),) for value in entropies if request.num_top_logps
            ),
        )

    async def abort(self, request_id):
        self.aborted.append(request_id)

    async def pause(self):
        pass

    async def resume(self):
        pass


@dataclass
class FakeSession:
    """A tool session that records the texts of its calls in `history`."""

    provider: FakeTools
    history: list = field(default_factory=list)
    released: int = 0
    on_wait: Callable = lambda waits: None
    """on_wait(waits): what `watch_waits` was given last."""

    async def create(self, tools_kwargs):
        self.provider.sessions.append(self)
        self.provider.fail("create")

    async def execute(self, tool, arguments):
        await self.provider.wait()
        self.history.append(arguments["text"])
        status = self.provider.status(arguments["text"])
        answer = self.provider.answer(arguments["text"])
        return ToolOutcome(tool=tool, status=status, answer=answer, latency_s=0.5)

    def watch_waits(self, on_change):
        self.on_wait = on_change

    async def fork(self):
        await self.provider.wait()
        self.provider.fail("fork")
        if self.provider.fork_fails:
            raise RuntimeError("no sandbox is left")
        child = FakeSession(self.provider, list(self.history))
        self.provider.sessions.append(child)
        return child

    async def calc_reward(self):
        self.provider.fail("calc_reward")
        return {"python": float(len(self.history))}

    async def release(self):
        self.released += 1
        self.provider.fail("release")


@dataclass
class FakeTools:
    """A tool provider whose tools answer ``ok:<text>``."""

    answer: Callable = lambda text: f"ok:{text}"
    """answer(text): the answer to a call with this text."""
    status: Callable = lambda text: ToolStatus.ok
    """status(text): the status of the call."""
    delays: int | None = None
    """Seed of random waits; None disables them."""
    fork_fails: bool = False
    """Whether forking raises a `RuntimeError`."""
    fails_at: str = ""
    """Method of a session that raises a `ToolSessionError`: create, fork, calc_reward, release."""
    sessions: list = field(default_factory=list)
    """All sessions that were created or forked."""

    stop_strings = ("</search>", "</python>")

    def __post_init__(self):
        self._waits = random.Random(self.delays)

    async def wait(self):
        if self.delays is not None:
            await asyncio.sleep(self._waits.random() * 0.002)

    def fail(self, step):
        if step == self.fails_at:
            answer = f"{step}: no disk"
            raise ToolSessionError(
                ToolOutcome(
                    tool="python", status=ToolStatus.infra_error, answer=answer, latency_s=0.1
                )
            )

    def open_session(self):
        return FakeSession(self)

    uses_tool_messages = False

    def parse_calls(self, turn_text):
        call = self.parse_final_call(turn_text)
        return () if call is None else (call,)

    def parse_final_call(self, turn_text):
        found = CALL.search(turn_text)
        if found is None or not found[2]:
            return None
        return ToolCall(tool=found[1], arguments={"text": found[2]})

    def render_outcome(self, outcome):
        return f"<result>{outcome.answer}</result>"


class FakeRubric:
    """Correct if the response holds the answer 1; the reward is a hash of the text."""

    def score(self, trajectory):
        text = trajectory.response_text
        correct = "<answer>1</answer>" in text
        value = unit(text)
        return Score(value=value, correct=correct, f1=float(correct), answer="", reason="")
