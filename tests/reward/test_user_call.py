"""The forms in which reward functions of verl, EasyR1 and TRL are called."""

from __future__ import annotations

from functools import partial

import pytest

from mega_agentrl.reward.user_call import CallFormError, make_call
from tests.config.refusals import refused_input

ROW = {
    "data_source": "gsm8k",
    "solution_str": "so 4",
    "ground_truth": "4",
    "extra_info": {"index": 7, "level": "easy"},
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "so 4"},
    ],
    "num_turns": 2,
    "stop_reason": "eos",
    "tool_rewards": {"search": 0.5},
    "response_length": 3,
}


def of_verl(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return [data_source, solution_str, ground_truth, extra_info["index"], kwargs]


async def of_verl_async(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return of_verl(data_source, solution_str, ground_truth, extra_info, **kwargs)


def returns_a_coroutine(data_source, solution_str, ground_truth, extra_info=None):
    return of_verl_async(data_source, solution_str, ground_truth, extra_info)


class AsyncClass:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return of_verl(data_source, solution_str, ground_truth, extra_info)


class SyncClass:
    def __call__(self, **values):
        return of_verl(**values)


@pytest.mark.parametrize(
    "function",
    [of_verl, of_verl_async, returns_a_coroutine, AsyncClass, AsyncClass(), SyncClass, SyncClass()],
    ids=["sync", "async", "coroutine", "async_class", "async_instance", "class", "instance"],
)
def test_a_function_of_verl_gets_its_four_arguments(function):
    assert make_call(function).run(ROW) == ["gsm8k", "so 4", "4", 7, {}]


def test_a_batched_function_of_verl_gets_a_batch_of_one():
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        pairs = zip(solution_strs, ground_truths, extra_infos, strict=True)
        return [float(truth in text) + info["index"] for text, truth, info in pairs]

    assert make_call(compute_score).run(ROW) == 8.0


def test_a_batched_function_may_take_further_keywords_and_return_an_array():
    np = pytest.importorskip("numpy")

    async def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
        return np.ones(len(solution_strs))

    assert make_call(compute_score).run(ROW) == 1.0


def test_functions_of_easy_r1_get_their_rows():
    def batched(reward_inputs, format_weight=0.1):
        return [{"overall": row["response_length"] * format_weight} for row in reward_inputs]

    def single(reward_input, format_weight=0.1):
        return {"overall": float(reward_input["response"].endswith(reward_input["ground_truth"]))}

    assert make_call(batched).run(ROW) == {"overall": pytest.approx(0.3)}
    assert make_call(single).run(ROW) == {"overall": 1.0}


def test_functions_of_trl_get_conversations_and_columns():
    def reward(prompts, completions, ground_truth, level, **kwargs):
        assert prompts == [[{"role": "user", "content": "2+2?"}]]
        texts = [completion[0]["content"] for completion in completions]
        assert level == ["easy"]
        return [float(truth in text) for text, truth in zip(texts, ground_truth, strict=True)]

    assert make_call(reward).run(ROW) == 1.0

    async def other(completions, answer, **kwargs):
        return [1.0]

    with pytest.raises(CallFormError) as caught:
        make_call(other).run(ROW)
    assert caught.value.missing == ("answer",)


def test_a_function_gets_what_it_names():
    def of_gsm8k(solution_str, ground_truth, method="strict", score=1.0):
        return score if solution_str.endswith(ground_truth) and method == "flexible" else 0.0

    assert make_call(of_gsm8k).run(ROW) == 0.0
    assert make_call(partial(of_gsm8k, method="flexible")).run(ROW) == 1.0

    def mine(messages, num_turns, stop_reason, tool_rewards):
        return [messages[-1]["role"], num_turns, stop_reason, tool_rewards["search"]]

    assert make_call(mine).run(ROW) == ["assistant", 2, "eos", 0.5]


class NeedsKey:
    def __init__(self, key):
        self.key = key


@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (lambda queries, prompts, labels: 0, ("queries", "prompts", "labels")),
        (lambda args, sample, **kwargs: 0, ("args", "sample")),
        (lambda data, return_dict: 0, ("data", "return_dict")),
        (lambda solution_str, ground_truth, method: 0, ("method",)),
        (lambda reward_inputs, tokenizer: 0, ("tokenizer",)),
        (lambda text="": 0, ()),
        (NeedsKey, ()),
        (object, ()),
        (3, ()),
    ],
    ids=["openrlhf", "slime", "manager", "method", "easy_r1", "blind", "class", "object", "number"],
)
def test_other_functions_are_refused_with_the_arguments_that_no_row_has(function, missing):
    with pytest.raises(CallFormError) as caught:
        make_call(function)
    assert caught.value.missing == missing


def test_a_batched_function_that_loses_a_row_is_an_error():
    assert refused_input(make_call(lambda reward_inputs: []).run, ROW).got == 0
