"""No index is lost or repeated within an epoch, and a saved position goes on exactly."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.data.index_stream import ShuffledIndexStream, systematic_sample_counts
from mega_agentrl.errors import InputError

sizes = st.integers(1, 20)
requests = st.lists(st.integers(0, 30), max_size=8)


@given(sizes, requests, st.integers(0, 5))
def test_every_epoch_is_a_permutation_for_any_requests(num_items, counts, seed):
    stream = ShuffledIndexStream(num_items, seed)
    taken = [index for count in counts for index in stream.take(count)]
    assert len(taken) == sum(counts)
    for start in range(0, len(taken) - num_items + 1, num_items):
        assert sorted(taken[start : start + num_items]) == list(range(num_items))
    assert taken == ShuffledIndexStream(num_items, seed).take(len(taken))


@given(sizes, requests, st.integers(0, 30))
def test_a_resumed_stream_gives_what_an_unbroken_one_gives(num_items, counts, more):
    stream = ShuffledIndexStream(num_items, seed=7)
    for count in counts:
        stream.take(count)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = ShuffledIndexStream(num_items, seed=7)
    resumed.load_state_dict(state)
    assert resumed.take(more) == stream.take(more)


def test_epochs_and_seeds_differ():
    stream = ShuffledIndexStream(50, seed=0)
    first, second = stream.take(50), stream.take(50)
    assert first != second
    assert first != ShuffledIndexStream(50, seed=1).take(50)


def test_an_empty_stream_is_refused():
    with pytest.raises(InputError) as caught:
        ShuffledIndexStream(0, seed=0)
    assert (caught.value.name, caught.value.got) == ("num_items", 0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 1}, "sampler state, seed"),
        ({"num_items": 4}, "sampler state, num_items"),
        ({"position": 4}, "sampler state, epoch and position"),
        ({"extra": 1}, "sampler state"),
        ({"order": [0, 1, 2]}, "sampler state"),
    ],
    ids=["seed", "size", "position", "key", "weights"],
)
def test_a_foreign_or_damaged_state_is_refused(change, name):
    stream = ShuffledIndexStream(3, seed=0)
    with pytest.raises(InputError) as caught:
        stream.load_state_dict({**stream.state_dict(), **change})
    assert caught.value.name == name


def test_an_order_with_another_index_is_refused():
    stream = ShuffledIndexStream(2, seed=0, epoch_weights_fn=lambda: [1.0, 1.0])
    with pytest.raises(InputError) as caught:
        stream.load_state_dict(stream.state_dict() | {"order": [0, 2]})
    assert caught.value.name == "sampler state, order of epoch 0"


def test_the_epoch_is_that_of_the_last_index():
    stream = ShuffledIndexStream(3, seed=1)
    epochs = [(stream.take(1), stream.epoch)[1] for _ in range(7)]
    assert epochs == [0, 0, 0, 1, 1, 1, 2]


def test_without_shuffling_the_order_is_kept_and_repetitions_come_later():
    assert ShuffledIndexStream(4, seed=3, shuffle=False).take(6) == [0, 1, 2, 3, 0, 1]
    stream = ShuffledIndexStream(
        4, seed=3, shuffle=False, epoch_weights_fn=lambda: [1.0, 2.0, 0.0, 3.0]
    )
    assert stream.take(7) == [0, 1, 3, 1, 3, 3, 0]


def test_weights_of_one_change_nothing():
    weighted = ShuffledIndexStream(5, seed=3, epoch_weights_fn=lambda: [1.0] * 5)
    taken = [weighted.take(5) for _ in range(4)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in taken)


def test_weights_are_the_average_over_epochs_and_whole_ones_are_exact():
    weights = [0.25, 0.5, 1.0, 1.5, 2.0]
    stream = ShuffledIndexStream(5, seed=0, epoch_weights_fn=lambda: weights)
    counts, number = Counter(), 0
    while stream.epoch < 2000:
        counts[stream.take(1)[0]] += 1
        number += 1
    assert number == pytest.approx(2000 * sum(weights), rel=1e-2)
    assert [counts[index] / 2000 for index in range(5)] == pytest.approx(weights, abs=0.04)
    assert counts[2] in (2000, 2001) and 4000 <= counts[4] <= 4002


def test_empty_epochs_are_skipped():
    stream = ShuffledIndexStream(2, seed=1, epoch_weights_fn=lambda: [0.05, 0.05])
    taken = stream.take(20)
    assert set(taken) == {0, 1} and stream.epoch > 100


weights_of = st.lists(st.floats(0.05, 3.0), min_size=1, max_size=12)


@given(weights_of, st.integers(0, 99))
def test_every_count_is_next_to_its_weight_and_so_is_the_sum(weights, seed):
    counts = systematic_sample_counts(weights, np.random.default_rng(seed))
    assert all(
        abs(count - weight) < 1 + 1e-9 for count, weight in zip(counts, weights, strict=True)
    )
    assert abs(counts.sum() - sum(weights)) < 1 + 1e-9


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_invalid_weights_are_refused(weights):
    with pytest.raises(InputError) as caught:
        ShuffledIndexStream(2, seed=0, epoch_weights_fn=lambda: weights)
    assert caught.value.name == "weights"


@given(weights_of, requests, st.integers(0, 40), st.booleans())
def test_changed_weights_hold_from_the_next_epoch_on_after_a_resume(weights, counts, more, shuffle):
    """The order of the epoch that is under way is that of the weights it began with."""

    def made(scale):
        return ShuffledIndexStream(
            len(weights),
            7,
            shuffle=shuffle,
            epoch_weights_fn=lambda: [w * scale[0] for w in weights],
        )

    scale = [1.0]
    stream = made(scale)
    for count in counts:
        stream.take(count)
    scale[0] = 2.5
    resumed = made(scale)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert resumed.take(more) == stream.take(more)
