"""verl's tables, parser of calls, and rewards (`verl.utils`, `verl.experimental`)."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from verl.experimental.agent_loop.tool_parser import HermesToolParser
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import (
    default_compute_score,
    gsm8k,
    math_dapo,
    math_reward,
    search_r1_like_qa_em,
)

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.rl_dataset import read_prompts
from mega_agentrl.reward import user_reward
from mega_agentrl.tool.call_protocol.hermes import HermesProtocol
from mega_agentrl.types.records import ToolCall
from tests.peers.answers import verdicts
from tests.peers.comparison import Comparison, Reason

ANSWER = "The answer"
ROWS = (
    # gsm8k.py
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": 'How many? output after "####".'}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "answer": "48/2 = 24\n#### 72",
            "question": "How many?",
        },
    },
    # gsm8k_multiturn_w_tool.py
    {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": "You are a math expert."},
            {"role": "user", "content": "How many?"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {
            "split": "train",
            "index": 1,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}},
            "interaction_kwargs": {"query": "How many?", "ground_truth": "72"},
        },
    },
    # math_dataset.py
    {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": r"Half of 1? within \boxed{}."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"\frac{1}{2}"},
        "extra_info": {"split": "test", "index": 2},
    },
    # DAPO-Math-17k
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "Solve. The last line is Answer: $Answer."}],
        "ability": "MATH",
        "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": "34"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    },
    # preprocess_search_r1_dataset.py
    {
        "data_source": "searchR1_nq",
        "prompt": [{"role": "user", "content": "Who? Answer inside <answer>."}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Paris", "City of Paris"]}},
        "extra_info": {
            "index": 3,
            "need_tools_kwargs": True,
            "question": "Who?",
            "split": "train",
            "tools_kwargs": {
                "search": {
                    "create_kwargs": {
                        "ground_truth": {"target": ["Paris", "City of Paris"]},
                        "question": "Who?",
                        "data_source": "searchR1_nq",
                    }
                }
            },
        },
    },
    # full_hh_rlhf.py
    {
        "data_source": "Dahoas/full-hh-rlhf",
        "prompt": [{"role": "user", "content": "Hello?"}],
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": "Hello."},
        "extra_info": {"split": "train", "index": 4},
    },
)
"""Rows as verl's example scripts write them, one file each."""


def comparisons(num_inputs: int) -> Iterator[Comparison]:
    """Yield all comparisons."""
    yield Comparison(
        function="RLHFDataset, NaiveRewardManager: prompt and arguments of compute_score = "
        "data.rl_dataset",
        inputs=ROWS,
        ours=_our_reading,
        theirs=_verl_reading,
    )
    yield Comparison(
        function="default_compute_score = the same function in reward.functions",
        inputs=_responses(),
        ours=lambda case: _our_user_score(*case),
        theirs=lambda case: float(_score_of(default_compute_score(*case))),
    )
    yield verdicts("math_reward.is_equiv", math_reward.is_equiv)
    yield verdicts(
        "math_dapo.compute_score, after Answer:",
        lambda answer, truth: math_dapo.compute_score(f"Answer: {answer}", truth)["acc"],
    )
    yield verdicts("search_r1_like_qa_em.em_check", search_r1_like_qa_em.em_check)
    yield verdicts(
        "gsm8k.compute_score, after ####",
        lambda answer, truth: gsm8k.compute_score(f"#### {answer}", truth) == 1.0,
    )
    yield Comparison(
        function="HermesToolParser = HermesProtocol.parse_calls",
        inputs=_turns(num_inputs),
        ours=_our_calls,
        theirs=_verl_calls,
        reasons=tuple(
            Reason(text, lambda turn, name=name: name in turn) for name, text in DIFFERENT.items()
        ),
    )


def _our_reading(row: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
        (read,) = read_prompts([DataFile(path=str(path))], DataConfig(), key="data.train")
    prompt = read.prompt
    extra = dict(prompt.extra_info)
    if prompt.tools_kwargs:
        extra["tools_kwargs"] = prompt.tools_kwargs
    return {
        "messages": prompt.messages,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": extra,
        "index": prompt.prompt_id.removeprefix(f"{prompt.data_source}/"),
    }


def _verl_reading(row: dict[str, Any]) -> dict[str, Any]:
    row = copy.deepcopy(row)
    dataset = RLHFDataset.__new__(RLHFDataset)
    dataset.image_key, dataset.video_key, dataset.audio_key = "images", "videos", "audios"
    messages = dataset._build_messages(row, key="prompt")
    called: dict[str, Any] = {}

    def compute_score(**arguments: Any) -> float:
        called.update(arguments)
        return 0.0

    loop = asyncio.new_event_loop()
    manager = NaiveRewardManager.__new__(NaiveRewardManager)
    manager.compute_score, manager.is_async_reward_score = compute_score, False
    manager.reward_router_address, manager.loop = None, loop
    manager.tokenizer = SimpleNamespace(decode=lambda *_, **__: ANSWER)
    item = SimpleNamespace(
        batch={"responses": torch.zeros(1), "attention_mask": torch.ones(1, dtype=torch.int64)},
        non_tensor_batch=row,
    )
    loop.run_until_complete(manager.run_single(_OneItem(item)))
    loop.close()
    extra = called["extra_info"]
    # Known only after the rollout; ours are tested in tests/reward.
    del extra["num_turns"], extra["rollout_reward_scores"]
    return {
        "messages": messages,
        "data_source": called["data_source"],
        "ground_truth": called["ground_truth"],
        "extra_info": extra,
        "index": str(extra["index"]),
    }


class _OneItem:
    """A DataProto of one item."""

    def __init__(self, item: SimpleNamespace) -> None:
        self._item = item

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else self._item


def _responses() -> Iterator[tuple[str, str, Any]]:
    truths = {
        "openai/gsm8k": "72",
        "DigitalLearningGmbH/MATH-lighteval": r"\frac{1}{2}",
        "math_dapo": "34",
        "searchR1_nq": {"target": ["Paris", "City of Paris"]},
    }
    answers = ("72", "34", r"\frac{1}{2}", "paris", "0.5", "")
    forms = ("#### {}", r"\boxed{{{}}}", "Answer: {}", "<answer>{}</answer>", "{}")
    for (source, truth), answer, form in itertools.product(truths.items(), answers, forms):
        yield source, f"Let me think. {form.format(answer)}", truth


def _score_of(result: Any) -> Any:
    return result["score"] if isinstance(result, dict) else result


def _our_user_score(data_source: str, solution: str, truth: Any) -> float:
    values = (data_source, solution, truth, {})
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    path = "verl.utils.reward_score:default_compute_score"
    return user_reward.run(path, dict(zip(names, values, strict=True)))["score"]


_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "note": "é"}}\n</tool_call>'
PIECES = {
    "text": "Let me see. ",
    "thought": "<think>I add.</think>\n",
    "call": _CALL,
    "other call": '<tool_call>{"name": "get", "arguments": {}}</tool_call>\n',
    "nested": '<tool_call>{"name": "get", "arguments": {"a": {"b": [1, null]}}}</tool_call>',
    "broken": '<tool_call>{"name": "add", "arguments": {"x": }}</tool_call>',
    "no name": '<tool_call>{"arguments": {"x": 1}}</tool_call>',
    "thought call": f"<think>maybe {_CALL}</think>",
    "tag in text": '<tool_call>{"name": "put", "arguments": {"t": "</tool_call>"}}</tool_call>',
    "parameters": '<tool_call>{"name": "add", "parameters": {"x": 1}}</tool_call>',
    "encoded": '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>',
    "null": '<tool_call>{"name": "now", "arguments": null}</tool_call>',
    "list": '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    "no arguments": '<tool_call>{"name": "now"}</tool_call>',
    "unclosed": '<tool_call>{"name": "add", "arguments": {"x": 1}}',
}
"""Parts of turns."""
DIFFERENT = {
    "thought call": "a call within the reasoning is no call here",
    "tag in text": "a call ends where its JSON ends here, not at a tag in a text",
    "unclosed": "a last call without closing tag runs here, as in vLLM",
    "parameters": "`parameters`, as Llama writes, are arguments here",
    "encoded": "arguments that are encoded as a text are decoded here",
    "null": "null is no arguments here",
    "list": "arguments that are no object are an error for the policy here",
    "no arguments": "a call without arguments calls a tool without parameters here",
}
"""Parts that are read in another way, with the reason."""


def _turns(num_inputs: int) -> Iterator[tuple[str, ...]]:
    """Yield all turns of one and two parts, and random ones of three."""
    yield from itertools.product(PIECES)
    yield from itertools.product(PIECES, repeat=2)
    generator = torch.Generator().manual_seed(51)
    names = list(PIECES)
    for _ in range(num_inputs):
        yield tuple(names[i] for i in torch.randint(len(names), (3,), generator=generator).tolist())


def _text(turn: Sequence[str]) -> str:
    return "".join(PIECES[name] for name in turn)


def _our_calls(turn: Sequence[str]) -> list[tuple[str, Any]]:
    calls = HermesProtocol(["add", "get", "put", "now"]).parse_calls(_text(turn))
    return [(call.tool, dict(call.arguments)) for call in calls if isinstance(call, ToolCall)]


def _verl_calls(turn: Sequence[str]) -> list[tuple[str, Any]]:
    parser = HermesToolParser(SimpleNamespace(decode=lambda _: _text(turn)))
    _, calls = asyncio.run(_unwrapped(HermesToolParser.extract_tool_calls)(parser, []))
    return [(call.name, json.loads(call.arguments)) for call in calls]


def _unwrapped(function: Callable) -> Callable:
    return getattr(function, "__wrapped__", function)
