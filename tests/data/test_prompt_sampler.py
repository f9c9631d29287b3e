"""Prompts come once an epoch; the state belongs to one dataset."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.config.enums import PromptOrder
from mega_agentrl.data.prompt_sampler import MIN_LEARNABILITY, PromptSampler, learnability_weights
from mega_agentrl.types.protocols import Stateful
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
    ids = [prompt.prompt_id for _ in range(5) for prompt in sampler.next_prompts(5)]
    assert sorted(ids[:10]) == sorted(ids[10:20]) == sorted(f"q/{i}" for i in range(10))
    assert len(set(ids[20:])) == 5


def test_a_step_larger_than_the_dataset_runs_over_the_epochs_end():
    assert len(PromptSampler(prompts(3), seed=0).next_prompts(8)) == 8


def names(given) -> list[str]:
    return [prompt.prompt_id for prompt in given]


def resumed(sampler: PromptSampler) -> PromptSampler:
    copy = PromptSampler(prompts(10), seed=3)
    copy.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    return copy


def test_resuming_goes_on_with_the_next_prompt():
    sampler = PromptSampler(prompts(10), seed=3)
    sampler.ack(sampler.next_prompts(7))
    assert resumed(sampler).next_prompts(9) == sampler.next_prompts(9)
    assert isinstance(sampler, Stateful)


def test_requeued_prompts_come_first_in_order():
    sampler = PromptSampler(prompts(10), seed=3)
    first = sampler.next_prompts(6)
    sampler.nack(first[3:5])
    sampler.nack(first[1:2])
    assert names(sampler.next_prompts(4))[:3] == names([first[1], first[3], first[4]])


def test_a_resumed_sampler_starts_with_the_prompts_in_flight():
    sampler = PromptSampler(prompts(10), seed=3)
    given = sampler.next_prompts(6)
    sampler.ack([given[2], given[0]])
    sampler.nack([given[4]])
    expected = names([given[1], given[3], given[5], given[4]])
    copy = resumed(sampler)
    assert names(copy.next_prompts(5)) == [*expected, sampler.next_prompts(2)[1].prompt_id]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=12))
def test_every_prompt_is_acked_once_an_epoch_whatever_is_requeued(steps):
    sampler, acked = PromptSampler(prompts(10), seed=3), []
    for num_prompts, num_back in steps:
        taken = sampler.next_prompts(num_prompts)
        size = max(0, num_prompts - num_back)
        sampler.nack(taken[size:])
        sampler.ack(taken[:size])
        acked += names(taken[:size])
        sampler = resumed(sampler)
    assert acked == names(PromptSampler(prompts(10), seed=3).next_prompts(len(acked)))


def test_a_prompt_is_acked_or_nacked_once():
    sampler = PromptSampler(prompts(10), seed=3)
    taken = sampler.next_prompts(2)
    sampler.ack(taken)
    with pytest.raises(ValueError, match="is not in flight"):
        sampler.ack(taken[:1])
    with pytest.raises(ValueError, match="is not in flight"):
        sampler.nack(taken[1:])


def test_a_damaged_state_is_refused():
    state = PromptSampler(prompts(10), seed=3).state_dict() | {"in_flight": [10]}
    with pytest.raises(ValueError, match=r"prompts \[10\] are in flight"):
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


def test_a_rule_excludes_prompts_from_its_epoch_and_changes_nothing_else():
    plain = names(PromptSampler(prompts(10), seed=3).next_prompts(30))
    asked = []

    def rule(epoch):
        asked.append(epoch)
        return {"q/2", "q/5", "another"} if epoch == 1 else ()

    sampler = PromptSampler(prompts(10), seed=3)
    sampler.exclude(rule)
    given = names(sampler.next_prompts(14)) + names(sampler.next_prompts(14))
    left = [name for name in plain[10:20] if name not in ("q/2", "q/5")]
    assert given == plain[:10] + left + plain[20:]
    assert asked == [0, 1, 2] and sampler.num_excluded == 2 and sampler.epoch == 2


def test_an_epoch_that_would_be_empty_is_whole_and_requeued_prompts_come_again():
    sampler = PromptSampler(prompts(10), seed=3)
    taken = sampler.next_prompts(4)
    sampler.nack(taken[2:])
    sampler.exclude(lambda epoch: {prompt.prompt_id for prompt in taken} if not epoch else ())
    assert names(sampler.next_prompts(2)) == names(taken[2:])
    sampler.exclude(lambda epoch: {prompt.prompt_id for prompt in sampler.prompts})
    assert len(names(sampler.next_prompts(20))) == 20 and sampler.num_excluded == 0


left_out = st.lists(st.sets(st.integers(0, 9), max_size=9), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(left_out, st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=12))
def test_no_prompt_but_the_excluded_is_lost_or_repeated(by_epoch, steps):
    def rule(epoch):
        return {f"q/{index}" for index in by_epoch[epoch % len(by_epoch)]}

    sampler, acked = PromptSampler(prompts(10), seed=3), []
    for num_prompts, num_back in steps:
        sampler.exclude(rule)
        taken = sampler.next_prompts(num_prompts)
        size = max(0, num_prompts - num_back)
        sampler.nack(taken[size:])
        sampler.ack(taken[:size])
        acked += names(taken[:size])
        sampler = resumed(sampler)
    plain = names(PromptSampler(prompts(10), seed=3).next_prompts(10 * (len(acked) + 5)))
    expected = [name for at, name in enumerate(plain) if name not in rule(at // 10)]
    assert acked == expected[: len(acked)]


def test_the_number_of_exclusions_is_part_of_the_state():
    sampler = PromptSampler(prompts(10), seed=3)
    sampler.exclude(lambda epoch: {"q/1"})
    sampler.ack(sampler.next_prompts(9))
    sampler.ack(sampler.next_prompts(1))
    assert sampler.num_excluded >= 1
    assert resumed(sampler).num_excluded == sampler.num_excluded


def drawn(sampler, epochs):
    """How often each prompt came in so many epochs."""
    counts = Counter()
    while True:
        (prompt,) = sampler.next_prompts(1)
        sampler.ack([prompt])
        if sampler.epoch >= epochs:
            return counts
        counts[prompt.prompt_id] += 1


def test_files_come_as_often_as_they_weigh():
    weights = [1.0] * 5 + [0.5] * 4 + [2.0]
    counts = drawn(PromptSampler(prompts(10), seed=3, weights=weights), 400)
    assert all(counts[f"q/{index}"] == 400 for index in range(5))
    assert all(150 < counts[f"q/{index}"] < 250 for index in range(5, 9))
    assert counts["q/9"] == 800


def test_in_the_order_of_the_files():
    sampler = PromptSampler(prompts(4), seed=3, order=PromptOrder.file)
    assert names(sampler.next_prompts(6)) == ["q/0", "q/1", "q/2", "q/3", "q/0", "q/1"]


def test_prompts_that_are_answered_half_of_the_time_come_more_often_from_the_next_epoch_on():
    sampler = PromptSampler(prompts(10), seed=3, order=PromptOrder.difficulty)
    sampler.ack(sampler.next_prompts(5))
    sampler.record_accuracies({f"q/{index}": 0.0 for index in range(4)} | {"q/4": 1.0})
    sampler.record_accuracies({f"q/{index}": 0.5 for index in range(5, 10)})
    sampler.ack(sampler.next_prompts(5))
    assert sampler.epoch == 0 and len(sampler._stream._order) == 10
    counts = drawn(sampler, 401)
    assert counts.total() == 4000
    # Weights .1 and 1, of which five each are 5.5; scaled to 10 in all.
    assert [counts[f"q/{index}"] / 400 for index in range(5)] == pytest.approx([0.18] * 5, abs=0.06)
    assert [counts[f"q/{i}"] / 400 for i in range(5, 10)] == pytest.approx([1.82] * 5, abs=0.06)


def test_without_that_order_what_is_recorded_is_forgotten():
    sampler = PromptSampler(prompts(10), seed=3)
    sampler.record_accuracies({"q/1": 0.0})
    assert sampler.state_dict()["accuracies"] == {}
    for bad in ({"q/1": 1.5}, {"another": 0.5}):
        with pytest.raises(ValueError, match="expected one in"):
            sampler.record_accuracies(bad)


accuracies = st.dictionaries(st.integers(0, 9), st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=4)
orders = st.sampled_from(list(PromptOrder))


@settings(max_examples=60, deadline=None)
@given(
    orders,
    st.lists(st.sampled_from([0.3, 1.0, 2.5]), min_size=10, max_size=10),
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 5), accuracies, st.booleans()), max_size=12
    ),
)
def test_interruptions_anywhere_change_nothing(order, weights, steps):
    """Whatever is recorded, nacked, acked or excluded, and wherever the run is interrupted."""

    def made():
        return PromptSampler(prompts(10), seed=3, weights=weights, order=order)

    def rule(epoch):
        return {f"q/{epoch % 10}"}

    unbroken, broken = made(), made()
    for num_prompts, num_back, seen, breaks in steps:
        for sampler in (unbroken, broken):
            sampler.exclude(rule)
        expected, taken = unbroken.next_prompts(num_prompts), broken.next_prompts(num_prompts)
        assert names(taken) == names(expected)
        size = max(0, num_prompts - num_back)
        for sampler, given_out in ((unbroken, expected), (broken, taken)):
            sampler.nack(given_out[size:])
            sampler.ack(given_out[:size])
            sampler.record_accuracies({f"q/{index}": share for index, share in seen.items()})
        if breaks:
            state = json.loads(json.dumps(broken.state_dict()))
            broken = made()
            broken.load_state_dict(state)
    for sampler in (unbroken, broken):
        sampler.exclude(None)
    assert names(broken.next_prompts(40)) == names(unbroken.next_prompts(40))


def test_a_state_of_another_order_or_other_weights_is_refused():
    state = PromptSampler(prompts(10), seed=3).state_dict()
    for options in ({"order": PromptOrder.file}, {"weights": [2.0] * 10}):
        with pytest.raises(ValueError, match=r"or its weights or data\.order have changed"):
            PromptSampler(prompts(10), seed=3, **options).load_state_dict(state)
    with pytest.raises(ValueError, match="got 3 weights for 10 prompts"):
        PromptSampler(prompts(10), seed=3, weights=[1.0] * 3)


def test_concurrent_threads_lose_no_prompt():
    sampler, taken, states = PromptSampler(prompts(50), seed=0), [], []
    is_over = threading.Event()

    def save():
        while not is_over.is_set():
            states.append(sampler.state_dict())

    def take():
        for _ in range(100):
            given = sampler.next_prompts(5)
            taken.extend(prompt.prompt_id for prompt in given[:4])
            sampler.nack(given[4:])
            sampler.ack(given[:4])

    saver, takers = threading.Thread(target=save), [threading.Thread(target=take) for _ in "12"]
    for thread in (saver, *takers):
        thread.start()
    for thread in takers:
        thread.join(60)
    is_over.set()
    saver.join(60)
    # 800 acked; prompts of the last epoch may be requeued or still to come.
    counts = Counter(taken)
    assert sum(counts.values()) == 800
    assert max(counts.values()) - min(counts.values()) <= 2
    assert not sampler.state_dict()["in_flight"]
    assert all(len(set(state)) == 6 for state in states[-1:])


def test_learnability_by_hand():
    # f: 1 (not seen), 1 (1/2), .75 (1/4 or 3/4), .1 (never, always); the sum 3.6 becomes 6.
    accuracies = {1: 0.5, 2: 0.25, 3: 0.75, 4: 0.0, 5: 1.0}
    weights = learnability_weights([1.0] * 6, accuracies)
    expected = [1, 1, 0.75, 0.75, 0.1, 0.1]
    assert weights == pytest.approx([value * 6 / 3.7 for value in expected])


def test_files_keep_their_say_and_nothing_seen_is_nothing_changed():
    assert learnability_weights([2.0, 0.5], {}) == [2.0, 0.5]
    assert learnability_weights([3.0, 1.0], {0: 0.0, 1: 0.0}) == pytest.approx([3.0, 1.0])


@given(
    st.lists(st.floats(0.1, 5), min_size=3, max_size=8),
    st.dictionaries(st.integers(0, 2), st.floats(0, 1)),
)
def test_an_epoch_stays_as_long_and_nothing_starves(base, accuracies):
    weights = learnability_weights(base, accuracies)
    assert sum(weights) == pytest.approx(sum(base))
    shares = [weight / given for weight, given in zip(weights, base, strict=True)]
    assert min(shares) >= MIN_LEARNABILITY * max(shares) * (1 - 1e-9)


@given(st.floats(0, 1), st.floats(0, 1))
def test_nearer_to_one_half_is_not_less(one, other):
    weights = learnability_weights([1.0, 1.0], {0: one, 1: other})
    if abs(one - 0.5) <= abs(other - 0.5):
        assert weights[0] >= weights[1] * (1 - 1e-9)
