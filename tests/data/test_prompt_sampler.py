"""Prompts come once an epoch; the state belongs to one dataset."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.config.enums import PromptOrder
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.data.prompt_sampler import MIN_LEARNABILITY, PromptSampler, learnability_weights
from mega_agentrl.data.row_identity import FileDigest
from mega_agentrl.errors import InputError
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


def names(given) -> list[str]:
    return [prompt.prompt_id for prompt in given]


def resumed(sampler: PromptSampler) -> PromptSampler:
    copy = PromptSampler(prompts(10), seed=3)
    copy.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    return copy


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


def test_a_prompt_is_acked_or_nacked_once():
    sampler = PromptSampler(prompts(10), seed=3)
    taken = sampler.next_prompts(2)
    sampler.ack(taken)
    for call, (prompt,) in ((sampler.ack, taken[:1]), (sampler.nack, taken[1:])):
        with pytest.raises(InputError) as caught:
            call([prompt])
        assert caught.value.name == f"prompt {prompt.prompt_id}"


def test_no_prompts_and_other_numbers_of_weights_are_refused():
    with pytest.raises(InputError) as caught:
        PromptSampler([], seed=0)
    assert (caught.value.name, caught.value.got) == ("prompts", 0)
    with pytest.raises(InputError) as caught:
        PromptSampler(prompts(10), seed=3, weights=[1.0] * 3)
    assert (caught.value.name, caught.value.got) == ("weights", 3)


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


def test_prompts_come_in_the_order_of_the_files():
    sampler = PromptSampler(prompts(4), seed=3, order=PromptOrder.file)
    assert names(sampler.next_prompts(6)) == ["q/0", "q/1", "q/2", "q/3", "q/0", "q/1"]


def test_prompts_that_are_half_solved_come_more_often_from_the_next_epoch_on():
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


def test_other_orders_record_no_accuracies():
    sampler = PromptSampler(prompts(10), seed=3)
    sampler.record_accuracies({"q/1": 0.0})
    assert sampler.state_dict()["accuracies"] == {}
    for bad in ({"q/1": 1.5}, {"another": 0.5}):
        with pytest.raises(InputError) as caught:
            sampler.record_accuracies(bad)
        ((prompt_id, accuracy),) = bad.items()
        assert caught.value.name == f"accuracy of prompt {prompt_id}"
        assert caught.value.got == accuracy


def sampler_of(*files, count=10, **options):
    digests = [FileDigest(path, digest) for path, digest in files]
    return PromptSampler(prompts(count), seed=3, files=digests, **options)


SAVED = (("a.parquet", "1"), ("b.parquet", "2"))


@pytest.mark.parametrize(
    ("files", "named"),
    [
        pytest.param((("a.parquet", "1"), ("b.parquet", "3")), "b.parquet", id="replaced"),
        pytest.param(
            (("b.parquet", "2"), ("a.parquet", "1")), "b.parquet, a.parquet", id="reordered"
        ),
        pytest.param((("a.parquet", "1"),), "b.parquet", id="removed"),
        pytest.param((*SAVED, ("c.parquet", "4")), "c.parquet", id="added"),
    ],
)
def test_changed_rows_are_an_error_that_names_the_file(files, named):
    state = json.loads(json.dumps(sampler_of(*SAVED).state_dict()))
    with pytest.raises(ConfigError) as caught:
        sampler_of(*files).load_state_dict(state)
    assert (caught.value.key, caught.value.got) == ("data.train", f"other rows in {named}")
    assert "data.accept_changed_rows" in caught.value.expected


def test_a_file_that_was_moved_has_the_same_rows():
    saved = sampler_of(*SAVED)
    taken = names(saved.next_prompts(4))
    moved = sampler_of(("/disk/a.parquet", "1"), ("/disk/b.parquet", "2"))
    moved.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert names(moved.next_prompts(4)) == taken


def test_accepted_changes_start_the_epoch_anew_so_that_it_misses_no_prompt(caplog):
    saved = sampler_of(*SAVED, order=PromptOrder.difficulty)
    saved.ack(saved.next_prompts(14))
    saved.record_accuracies({"q/1": 0.0})
    changed = sampler_of(("a.parquet", "7"), count=6, accept_changed_rows=True)
    changed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert changed.num_epochs == 1.0
    assert sorted(names(changed.next_prompts(6))) == sorted(names(prompts(6)))
    assert changed.epoch == 1
    (record,) = caplog.records
    assert record.args == ("a.parquet, b.parquet", 1)


def test_the_state_of_a_version_without_digests_of_files_is_continued():
    saved = sampler_of(*SAVED)
    saved.ack(saved.next_prompts(4))
    state = saved.state_dict()
    del state["files"]
    continued = sampler_of(("a.parquet", "7"))
    continued.load_state_dict(state)
    assert names(continued.next_prompts(3)) == names(saved.next_prompts(3))


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
def test_a_resumed_sampler_gives_what_an_unbroken_one_gives(order, weights, steps):
    """Whatever is recorded, requeued, acknowledged or excluded before each interruption."""

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
    assert broken.num_excluded == unbroken.num_excluded
    for sampler in (unbroken, broken):
        sampler.exclude(None)
    assert names(broken.next_prompts(40)) == names(unbroken.next_prompts(40))


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"prompts": prompts(10, "b")}, {}),
        ({"order": PromptOrder.file}, {}),
        ({"weights": [2.0] * 10}, {}),
        ({}, {"in_flight": [10]}),
        ({}, {"accuracies": {"10": 0.5}}),
        ({}, {"unknown": 1}),
    ],
    ids=["dataset", "order", "weights", "index", "accuracy", "key"],
)
def test_a_foreign_or_damaged_state_is_refused(options, change):
    state = PromptSampler(prompts(10), seed=3).state_dict() | change
    sampler = PromptSampler(**({"prompts": prompts(10), "seed": 3} | options))
    with pytest.raises(InputError) as caught:
        sampler.load_state_dict(state)
    assert caught.value.name.startswith("sampler state")


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
        thread.join(300)
    is_over.set()
    saver.join(300)
    # 800 acked; prompts of the last epoch may be requeued or still to come.
    counts = Counter(taken)
    assert sum(counts.values()) == 800
    assert max(counts.values()) - min(counts.values()) <= 2
    assert not sampler.state_dict()["in_flight"]
    assert all(len(set(state)) == 7 for state in states[-1:])


def test_learnability_is_highest_at_half_solved_prompts():
    # f: 1 (not seen), 1 (1/2), .75 (1/4 or 3/4), .1 (never, always); the sum 3.6 becomes 6.
    accuracies = {1: 0.5, 2: 0.25, 3: 0.75, 4: 0.0, 5: 1.0}
    weights = learnability_weights([1.0] * 6, accuracies)
    expected = [1, 1, 0.75, 0.75, 0.1, 0.1]
    assert weights == pytest.approx([value * 6 / 3.7 for value in expected])


def test_learnability_keeps_the_ratio_of_files_if_all_accuracies_are_equal():
    assert learnability_weights([2.0, 0.5], {}) == [2.0, 0.5]
    assert learnability_weights([3.0, 1.0], {0: 0.0, 1: 0.0}) == pytest.approx([3.0, 1.0])


@given(
    st.lists(st.floats(0.1, 5), min_size=3, max_size=8),
    st.dictionaries(st.integers(0, 2), st.floats(0, 1)),
)
def test_learnability_keeps_the_length_of_an_epoch_and_has_a_minimum(base, accuracies):
    weights = learnability_weights(base, accuracies)
    assert sum(weights) == pytest.approx(sum(base))
    shares = [weight / given for weight, given in zip(weights, base, strict=True)]
    assert min(shares) >= MIN_LEARNABILITY * max(shares) * (1 - 1e-9)


@given(st.floats(0, 1), st.floats(0, 1))
def test_accuracies_nearer_to_one_half_weigh_no_less(one, other):
    weights = learnability_weights([1.0, 1.0], {0: one, 1: other})
    if abs(one - 0.5) <= abs(other - 0.5):
        assert weights[0] >= weights[1] * (1 - 1e-9)


def test_done_prompts_are_counted_in_epochs():
    sampler = PromptSampler(prompts(4), seed=1)
    assert sampler.num_epochs == 0.0
    drawn = sampler.next_prompts(3)
    assert sampler.num_epochs == 0.0, "outstanding prompts are not done"
    sampler.ack(drawn[:2])
    sampler.nack(drawn[2:])
    assert sampler.num_epochs == 0.5
    for _ in range(2):
        sampler.ack(sampler.next_prompts(4))
    assert sampler.num_epochs == 2.5
