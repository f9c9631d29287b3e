"""Tiny deterministic stand-ins for the ports: an engine, tools, a codec, a rubric.

One token is one character, id = code point; id 0 ends a turn. A prompt ends in ``?``, what
follows is the response. The engine writes what `write(response, request)` returns, cut at
stop strings and at `max_tokens`; `random_text` makes that a random language of words, tool
calls and answers, drawn from the request's seed alone.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from mega_agentrl.types.records import (
    Finish,
    Generation,
    Prompt,
    Score,
    ToolCall,
    ToolOutcome,
    ToolStatus,
)

EOS = "\0"
CALL = re.compile(r"<(search|python)>([^<]*)</\1>$")
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


def unit(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=6).digest(), "big") / 2**48


class CharCodec:
    """Characters as ids; the end of a turn decodes to nothing."""

    eos_id = 0
    vocab_size = 130

    def encode(self, text):
        return [ord(char) for char in text]

    def decode(self, token_ids):
        return "".join(chr(token) for token in token_ids if token)


def random_text(response: str, request) -> Iterator[str]:
    """An endless turn in the language of `ITEMS`, drawn from the seed."""
    begun = max((i for i in ITEMS if _ends_in(response, i)), key=len, default="")
    text = response
    yield from begun[_ends_in(response, begun) :]
    while True:
        item = ITEMS[int(unit(request.seed, len(text)) ** 1.5 * len(ITEMS))]
        yield from item
        text += item


def _ends_in(text: str, item: str) -> int:
    """How many characters of a tag item the text ends in."""
    if not item.startswith("<"):
        return 0
    return max((n for n in range(1, len(item)) if text.endswith(item[:n])), default=0)


def turns(*texts: str) -> Callable:
    """Writes the given turns whatever is sampled; tool answers end in ``</result>``."""

    def write(response, request):
        *results, spoken = response.split("</result>")
        return texts[len(results)][len(spoken) :]

    return write


@dataclass
class FakeGenerator:
    """The engine. delays: seed of random waits, None for none. breaks: raises on a request.

    entropy(response, request): of the token that ends `response`.
    """

    write: Callable = random_text
    entropy: Callable = lambda response, request: 3 * unit(response, request.seed)
    delays: int | None = None
    breaks: Callable = lambda request: False
    version: int = 1
    can_serve: bool = True
    requests: list = field(default_factory=list)
    running: set = field(default_factory=set)
    aborted: list = field(default_factory=list)

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
        text, entropies, finish, stopped = "", [], Finish.length, None
        for char in self.write(before, request):
            text += char
            entropies.append(self.entropy(before + text, request))
            stopped = next((stop for stop in request.stop if text.endswith(stop)), None)
            if char == EOS or stopped:
                finish = Finish.eos if char == EOS else Finish.stop
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
            finish=finish,
            stop_string=stopped,
            version=self.version,
            # -p ln p of this alternative rises with the entropy.
            top_logps=tuple(
                (-1 - 1 / (value + 0.1),) for value in entropies if request.num_top_logps
            ),
        )

    async def abort(self, request_id):
        self.aborted.append(request_id)

    async def entropies(self, request_id):
        return ()

    async def pause(self):
        pass

    async def resume(self):
        pass


@dataclass
class FakeSession:
    """Tools that answer ``ok:<argument>`` and remember what was asked before them."""

    provider: FakeTools
    history: list = field(default_factory=list)
    released: int = 0

    async def create(self, tools_kwargs):
        self.provider.sessions.append(self)

    async def execute(self, tool, arguments):
        await self.provider.wait()
        self.history.append(arguments["text"])
        status = self.provider.status(arguments["text"])
        answer = self.provider.answer(arguments["text"])
        return ToolOutcome(tool=tool, status=status, answer=answer, latency_s=0.5)

    async def fork(self):
        await self.provider.wait()
        if self.provider.fork_fails:
            raise RuntimeError("no sandbox is left")
        child = FakeSession(self.provider, list(self.history))
        self.provider.sessions.append(child)
        return child

    async def calc_reward(self):
        return {"python": float(len(self.history))}

    async def release(self):
        self.released += 1


@dataclass
class FakeTools:
    """The tool provider; `sessions` are all that were created or forked."""

    answer: Callable = lambda text: f"ok:{text}"
    status: Callable = lambda text: ToolStatus.ok
    delays: int | None = None
    fork_fails: bool = False
    sessions: list = field(default_factory=list)

    stop_strings = ("</search>", "</python>")

    def __post_init__(self):
        self._waits = random.Random(self.delays)

    async def wait(self):
        if self.delays is not None:
            await asyncio.sleep(self._waits.random() * 0.002)

    def open(self):
        return FakeSession(self)

    answers_in_chat = False

    def read(self, turn_text):
        call = self.parse(turn_text)
        return () if call is None else (call,)

    def parse(self, turn_text):
        found = CALL.search(turn_text)
        if found is None or not found[2]:
            return None
        return ToolCall(tool=found[1], arguments={"text": found[2]})

    def render(self, outcome):
        return f"<result>{outcome.answer}</result>"


class FakeRubric:
    """Right where an answer was given; the reward is a number drawn from the text."""

    def score(self, trajectory):
        text = trajectory.response_text
        correct = "<answer>1</answer>" in text
        value = unit(text)
        return Score(value=value, correct=correct, f1=float(correct), answer="", reason="")
