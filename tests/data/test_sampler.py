"""Prompts come once an epoch; the state belongs to one dataset."""

import pytest

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


def test_resuming_goes_on_with_the_next_prompt():
    sampler = PromptSampler(prompts(10), seed=3)
    sampler.next(7)
    resumed = PromptSampler(prompts(10), seed=3)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.next(9) == sampler.next(9)
    assert isinstance(sampler, Stateful)


def test_the_state_of_another_dataset_is_refused():
    state = PromptSampler(prompts(10, "a"), seed=0).state_dict()
    with pytest.raises(ValueError, match=r"data\.train is not the dataset"):
        PromptSampler(prompts(10, "b"), seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match="got keys"):
        PromptSampler(prompts(10, "a"), seed=0).load_state_dict({"stream": state["stream"]})


def test_no_prompts_is_an_error():
    with pytest.raises(ValueError, match="0 prompts"):
        PromptSampler([], seed=0)
