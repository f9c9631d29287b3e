"""No index is lost or repeated within an epoch, and a saved position goes on exactly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.data.shuffle import ShuffledStream

sizes = st.integers(1, 20)
requests = st.lists(st.integers(0, 30), max_size=8)


@given(sizes, requests, st.integers(0, 5))
def test_every_epoch_is_a_permutation_however_it_is_asked_for(num_items, counts, seed):
    stream = ShuffledStream(num_items, seed)
    taken = [index for count in counts for index in stream.take(count)]
    assert len(taken) == sum(counts)
    for start in range(0, len(taken) - num_items + 1, num_items):
        assert sorted(taken[start : start + num_items]) == list(range(num_items))
    assert taken == ShuffledStream(num_items, seed).take(len(taken))


@given(sizes, requests, st.integers(0, 30))
def test_resuming_gives_what_an_unbroken_run_gives(num_items, counts, more):
    stream = ShuffledStream(num_items, seed=7)
    for count in counts:
        stream.take(count)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = ShuffledStream(num_items, seed=7)
    resumed.load_state_dict(state)
    assert resumed.take(more) == stream.take(more)


def test_epochs_and_seeds_differ():
    stream = ShuffledStream(50, seed=0)
    first, second = stream.take(50), stream.take(50)
    assert first != second
    assert first != ShuffledStream(50, seed=1).take(50)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed=1, expected 0"),
        ({"num_items": 4}, "num_items=4, expected 3"),
        ({"position": 4}, "position=4"),
        ({"extra": 1}, "got keys"),
    ],
)
def test_a_foreign_or_damaged_state_is_refused(change, message):
    stream = ShuffledStream(3, seed=0)
    with pytest.raises(ValueError, match=message):
        stream.load_state_dict({**stream.state_dict(), **change})


def test_an_empty_stream_is_an_error():
    with pytest.raises(ValueError, match="num_items=0"):
        ShuffledStream(0, seed=0)


def test_the_epoch_is_that_of_the_index_given_last():
    stream = ShuffledStream(3, seed=1)
    epochs = [(stream.take(1), stream.epoch)[1] for _ in range(7)]
    assert epochs == [0, 0, 0, 1, 1, 1, 2]
