"""Prompts come once an epoch; the state belongs to one dataset."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.data.sampler import PromptSampler
from mega_agentrl.types.ports import Stateful
from mega_agentrl.types.records import Prompt


def prompts(count: int, source: str = "q") -> list[Prompt]:
    return [
        Prompt(
            prompt_id=f"{source}/{index}",
            data_source=source,
            messages=({"role": "user", "content": str(index)},),
            ground_truth="1",
            token_ids=(index,),
        )
        for index in range(count)
    ]


def test_two_and_a_half_epochs_hold_each_prompt_two_or_three_times():
    sampler = PromptSampler(prompts(10), seed=0)
    ids = [prompt.prompt_id for _ in range(5) for prompt in sampler.next(5)]
    assert sorted(ids[:10]) == sorted(ids[10:20]) == sorted(f"q/{i}" for i in range(10))
    assert len(set(ids[20:])) == 5


def test_a_step_larger_than_the_dataset_runs_over_the_epochs_end():
    assert len(PromptSampler(prompts(3), seed=0).next(8)) == 8


def names(given) -> list[str]:
    return [prompt.prompt_id for prompt in given]


def resumed(sampler: PromptSampler) -> PromptSampler:
    copy = PromptSampler(prompts(10), seed=3)
    copy.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    return copy


def test_resuming_goes_on_with_the_next_prompt():
    sampler = PromptSampler(prompts(10), seed=3)
    sampler.settle(sampler.next(7))
    assert resumed(sampler).next(9) == sampler.next(9)
    assert isinstance(sampler, Stateful)


def test_what_was_put_back_comes_first_in_order():
    sampler = PromptSampler(prompts(10), seed=3)
    first = sampler.next(6)
    sampler.put_back(first[3:5])
    sampler.put_back(first[1:2])
    assert names(sampler.next(4))[:3] == names([first[1], first[3], first[4]])


def test_a_resumed_sampler_begins_with_what_was_out():
    sampler = PromptSampler(prompts(10), seed=3)
    given = sampler.next(6)
    sampler.settle([given[2], given[0]])
    sampler.put_back([given[4]])
    expected = names([given[1], given[3], given[5], given[4]])
    copy = resumed(sampler)
    assert names(copy.next(5)) == [*expected, sampler.next(2)[1].prompt_id]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=12))
def test_every_prompt_is_settled_once_an_epoch_whatever_is_put_back(steps):
    sampler, settled = PromptSampler(prompts(10), seed=3), []
    for num_prompts, num_back in steps:
        taken = sampler.next(num_prompts)
        size = max(0, num_prompts - num_back)
        sampler.put_back(taken[size:])
        sampler.settle(taken[:size])
        settled += names(taken[:size])
        sampler = resumed(sampler)
    assert settled == names(PromptSampler(prompts(10), seed=3).next(len(settled)))


def test_a_prompt_is_settled_or_put_back_once():
    sampler = PromptSampler(prompts(10), seed=3)
    taken = sampler.next(2)
    sampler.settle(taken)
    with pytest.raises(ValueError, match="it is not out"):
        sampler.settle(taken[:1])
    with pytest.raises(ValueError, match="it is not out"):
        sampler.put_back(taken[1:])


def test_a_damaged_state_is_refused():
    state = PromptSampler(prompts(10), seed=3).state_dict() | {"out": [10]}
    with pytest.raises(ValueError, match=r"prompts \[10\] are out"):
        PromptSampler(prompts(10), seed=3).load_state_dict(state)


def test_the_state_of_another_dataset_is_refused():
    state = PromptSampler(prompts(10, "a"), seed=0).state_dict()
    with pytest.raises(ValueError, match=r"data\.train is not the dataset"):
        PromptSampler(prompts(10, "b"), seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match="got keys"):
        PromptSampler(prompts(10, "a"), seed=0).load_state_dict({"stream": state["stream"]})


def test_no_prompts_is_an_error():
    with pytest.raises(ValueError, match="0 prompts"):
        PromptSampler([], seed=0)


def test_a_rule_leaves_prompts_out_of_its_epoch_and_changes_nothing_else():
    plain = names(PromptSampler(prompts(10), seed=3).next(30))
    asked = []

    def rule(epoch):
        asked.append(epoch)
        return {"q/2", "q/5", "another"} if epoch == 1 else ()

    sampler = PromptSampler(prompts(10), seed=3)
    sampler.leave_out(rule)
    given = names(sampler.next(14)) + names(sampler.next(14))
    left = [name for name in plain[10:20] if name not in ("q/2", "q/5")]
    assert given == plain[:10] + left + plain[20:]
    assert asked == [0, 1, 2] and sampler.num_left_out == 2 and sampler.epoch == 2


def test_an_epoch_that_would_be_empty_is_whole_and_what_was_put_back_is_given_again():
    sampler = PromptSampler(prompts(10), seed=3)
    taken = sampler.next(4)
    sampler.put_back(taken[2:])
    sampler.leave_out(lambda epoch: {prompt.prompt_id for prompt in taken} if not epoch else ())
    assert names(sampler.next(2)) == names(taken[2:])
    sampler.leave_out(lambda epoch: {prompt.prompt_id for prompt in sampler.prompts})
    assert len(names(sampler.next(20))) == 20 and sampler.num_left_out == 0


left_out = st.lists(st.sets(st.integers(0, 9), max_size=9), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(left_out, st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=12))
def test_no_prompt_is_lost_or_comes_twice_beside_those_left_out(by_epoch, steps):
    def rule(epoch):
        return {f"q/{index}" for index in by_epoch[epoch % len(by_epoch)]}

    sampler, settled = PromptSampler(prompts(10), seed=3), []
    for num_prompts, num_back in steps:
        sampler.leave_out(rule)
        taken = sampler.next(num_prompts)
        size = max(0, num_prompts - num_back)
        sampler.put_back(taken[size:])
        sampler.settle(taken[:size])
        settled += names(taken[:size])
        sampler = resumed(sampler)
    plain = names(PromptSampler(prompts(10), seed=3).next(10 * (len(settled) + 5)))
    expected = [name for at, name in enumerate(plain) if name not in rule(at // 10)]
    assert settled == expected[: len(settled)]


def test_the_count_of_those_left_out_is_part_of_the_state():
    sampler = PromptSampler(prompts(10), seed=3)
    sampler.leave_out(lambda epoch: {"q/1"})
    sampler.settle(sampler.next(9))
    sampler.settle(sampler.next(1))
    assert sampler.num_left_out >= 1
    assert resumed(sampler).num_left_out == sampler.num_left_out
