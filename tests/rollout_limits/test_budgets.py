"""Random scripts against every budget: no token, call or turn too many."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.config.enums import Branching, CallProtocol, InvalidCallAction
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.interaction.base import Interaction, Reply
from mega_agentrl.rollout.interaction.session import InteractionRegistry
from mega_agentrl.tool.base import Tool, ToolResponse
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.types.records import FinishReason, Generation, Role, StopReason
from tests.chat_models import save_tokenizer
from tests.fakes import FakeRubric, make_context, make_prompt, unit
from tests.rollout.virtual_time import run_virtually

MAX_MODEL_LEN = 2500


def _call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


PIECES = (
    "word ",
    _call("say", size=1),
    _call("say", size=200),
    _call("say", size="x"),
    _call("none"),
    "<tool_call>{",
    "<python>4</python>",
    "<think>a</think>",
)


class Say(Tool):
    """Answers as many letters as it is told, also by a tag's text."""

    name = "say"
    text_argument = "size"
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"size": {"type": "integer"}},
        "required": ["size"],
        "additionalProperties": False,
    }

    def __init__(self):
        self.num_run = 0

    async def execute(self, state, arguments, kwargs):
        self.num_run += 1
        return ToolResponse(text="z" * arguments["size"])


class Nag(Interaction):
    name = "nag"
    max_turns = 2

    def __init__(self):
        self.num_open = 0

    async def create(self, kwargs):
        self.num_open += 1
        return [0]

    async def respond(self, state, messages):
        state[0] += 1
        return Reply(text="more " * state[0], is_last=len(messages) % 5 == 4)

    async def fork(self, state):
        self.num_open += 1
        return list(state)

    async def release(self, state):
        self.num_open -= 1


class Random:
    """Draws the pieces of a turn from the seed and the place; some turns never end."""

    version = 1

    def __init__(self, codec, seed):
        self.codec, self.seed, self.requests = codec, seed, []

    async def generate(self, request):
        self.requests.append(request)
        turn = request.request_id.rpartition(".")[0]
        *draws, num = (unit(self.seed, turn, i) for i in range(6))
        text = "".join(PIECES[int(draw * len(PIECES))] for draw in draws[: int(num * 4)])
        ids = [*self.codec.encode(text)] + ([self.codec.eos_id] if draws[4] < 0.9 else [1] * 5000)
        finish = FinishReason.eos if draws[4] < 0.9 else FinishReason.length
        if len(ids) > request.max_tokens:
            ids, finish = ids[: request.max_tokens], FinishReason.length
        values = tuple(unit(self.seed, request.request_id, i) * 3 for i in range(len(ids)))
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(ids),
            logps=values,
            entropies=values,
            argmax_ids=tuple(ids),
            finish_reason=finish,
            stop_string=None,
            version=1,
        )


configs = st.builds(
    RolloutConfig,
    group_size=st.sampled_from([6, 3, 1]),
    branching=st.sampled_from([Branching.after_result, Branching.none]),
    branch=st.builds(BranchConfig, num_probe_tokens=st.integers(5, 9), initial_rollouts=st.just(1)),
    call_protocol=st.just(CallProtocol.hermes),
    on_invalid_call=st.sampled_from(InvalidCallAction),
    max_response_tokens=st.sampled_from([1, 40, 150, 300, 600, 1500, 4000]),
    max_turns=st.integers(1, 6),
    max_tool_calls=st.sampled_from([0, 1, 3, 6, 20]),
    use_inference_chat_template=st.booleans(),
)


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return [HFCodec(save_tokenizer(name, folder / name)) for name in ("qwen25", "qwen3", "llama3")]


@settings(max_examples=80, deadline=None)
@given(configs, st.integers(0, 10_000), st.integers(0, 2), st.booleans())
def test_no_random_script_gets_beyond_a_budget(codecs, config, seed, family, with_user):
    codec, say, nag = codecs[family], Say(), Nag()
    kit = ToolKit([say], control_tokens=codec.control_tokens, protocol=CallProtocol.hermes)
    messages = ({"role": "user", "content": "Q"},)
    prompt = make_prompt(
        messages=messages,
        token_ids=tuple(codec.apply_chat_template(messages)),
        extra_info={"interaction_kwargs": {}} if with_user else {},
    )
    generator = Random(codec, seed)
    context = make_context(
        config,
        generator=generator,
        tools=kit,
        codec=codec,
        max_model_len=MAX_MODEL_LEN,
        seed=seed,
        interactions=InteractionRegistry([nag]),
    )
    work = collect_rollouts([prompt], FakeRubric(), context)
    (tree,) = run_virtually(asyncio.wait_for(work, 300))
    assert len(tree.trajectories) == config.group_size and nag.num_open == 0
    for one in tree.trajectories:
        _check(one, config)
    for request in generator.requests:
        assert request.max_tokens >= 1
        assert len(request.token_ids) + request.max_tokens <= MAX_MODEL_LEN
    ran = sum(_num_run(one, one.fork_len) for one in tree.trajectories)
    assert say.num_run == ran


def _num_run(one, start):
    """Calls that were run behind response token `start`."""
    outcomes = [turn.outcome for turn in one.turns if turn.outcome and turn.start >= start]
    return sum(outcome.tool == "say" and outcome.status.value == "ok" for outcome in outcomes)


def _check(one, config):
    assert one.stop_reason in StopReason and not one.failed
    assert len(one.token_ids) <= config.max_response_tokens
    said = Counter(turn.role for turn in one.turns if turn.stop > turn.start)
    assert said[Role.assistant] <= config.max_turns and said[Role.user] <= Nag.max_turns
    assert one.num_tool_calls <= config.max_tool_calls and _num_run(one, 0) <= config.max_tool_calls
    if config.on_invalid_call is InvalidCallAction.stop:
        assert one.num_invalid_calls == 0 or one.stop_reason is StopReason.invalid_call
    at = 0
    for turn in one.turns:
        assert turn.start == at
        at = turn.stop
        mask = one.loss_mask[turn.start : turn.stop]
        assert set(mask) <= {int(turn.role is Role.assistant)}
    assert at == len(one.token_ids)
    assert bool(one.context_resets) <= config.use_inference_chat_template
