"""`algo.ares.entropy_windows`: golden rows, windows by hand, windows within turns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_agentrl.algo.ares.entropy_windows import (
    hwe_count,
    hwe_mask,
    normalize_trigger_token,
    soft_cost,
    threshold_p95,
    window_entropy,
)
from mega_agentrl.algo.branching import token_entropy_topk
from mega_agentrl.algo.masking import ROWS_PER_CHUNK
from mega_agentrl.errors import InputError
from tests.algo.golden_values import load_golden

GOLDEN = load_golden("ares_window_entropy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_entropies_and_windows_are_those_of_the_reference_implementation(case, dtype):
    logprob = torch.tensor(case["logprobs"], dtype=dtype)
    entropy = token_entropy_topk(logprob)
    assert entropy.tolist() == pytest.approx(case["token_entropy_tail"], abs=1e-5)
    assert entropy.mean().item() == pytest.approx(case["mean_entropy_tail_corrected"], abs=1e-5)
    words = [normalize_trigger_token(token) for token in case["tokens"]]
    assert words == case["normalised"]
    trigger = torch.tensor([[word in GOLDEN["trigger_set"] for word in words]])
    mask = torch.ones_like(trigger)
    got = window_entropy(entropy[None], mask, window=case["window"])
    num_windows = int((trigger & got.isfinite()).sum())
    for count in case["counts"]:
        hwe = hwe_count(got, trigger, threshold=count["threshold"])
        assert hwe.tolist() == [count["hwe"]]
        assert num_windows - int(hwe) == count["non_hwe"]
        cost = soft_cost(got, trigger, threshold=count["threshold"])
        assert cost.item() == pytest.approx(count["soft_cost"], abs=1e-5, rel=1e-5)
    bare = torch.tensor([case["token_entropy_no_tail"]], dtype=dtype)
    p95 = threshold_p95(bare, mask, window=case["window"])
    assert p95.item() == pytest.approx(case["p95_threshold"], abs=1e-5)


def test_a_window_has_the_mean_of_its_unmasked_tokens():
    entropy = torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.0], [1.0, 1.0, 1.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    got = window_entropy(entropy, mask, window=2)
    assert got[0, :3].tolist() == [2.5, 3.5, 6.5] and got[0, 3:].isnan().all()
    assert got[1, 0].item() == 1.0 and got[1, 1:].isnan().all()
    everywhere = torch.ones_like(mask)
    assert hwe_count(got, everywhere, threshold=3.5).tolist() == [2, 0]
    assert hwe_count(got, everywhere, threshold=-1).tolist() == [3, 1]
    assert soft_cost(got, everywhere, threshold=3.0).tolist() == [4.0, 0.0]
    covered = hwe_mask(got, threshold=3.5, window=2)
    assert covered.int().tolist() == [[0, 0, 1, 1, 1], [0] * 5]
    assert hwe_mask(got, threshold=6.0, window=2).int().tolist()[0] == [0, 0, 0, 1, 1]


def test_windows_stay_within_their_turn():
    entropy = torch.tensor([[1.0, 2.0, 50.0, 4.0, 5.0, 6.0]])
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    got = window_entropy(entropy, mask, window=2)
    assert got[0, 3].item() == 5.5
    assert got[0, [0, 1, 2, 4, 5]].isnan().all()
    assert not (hwe_mask(got, threshold=-1, window=2) & ~mask.bool()).any()


def reference_p95(entropy, mask, window):
    """One trajectory, position by position, as the rule is written."""
    values, own, length = [], None, len(entropy)
    proper = []
    for t in range(length):
        if not mask[t]:
            continue
        own = entropy[t] if own is None else own
        if t + window < length and all(mask[t + 1 : t + window + 1]):
            proper.append(sum(entropy[t + 1 : t + window + 1]) / window)
            values.append(proper[-1])
        else:
            values.append(sum(proper) / len(proper) if proper else own)
    return float(np.percentile(values, 95)) if values else math.nan


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.lists(st.tuples(st.floats(0, 10), st.booleans()), min_size=30, max_size=30),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 5),
)
def test_percentile_matches_the_rule_row_by_row(rows, window):
    entropy = torch.tensor([[cell[0] for cell in row] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[cell[1] or index < 12 for index, cell in enumerate(row)] for row in rows])
    mask[-1] &= torch.arange(30) != 3
    pairs = zip(entropy.tolist(), mask.tolist(), strict=True)
    want = [reference_p95(values, on, window) for values, on in pairs]
    for junk in (0.0, math.nan, math.inf):
        dirty = entropy.masked_fill(~mask, junk)
        assert threshold_p95(dirty, mask, window=window).tolist() == pytest.approx(want, abs=1e-9)
        torch.testing.assert_close(
            window_entropy(dirty, mask, window=window),
            window_entropy(entropy, mask, window=window),
            equal_nan=True,
        )


def test_the_percentile_is_defined_for_few_and_many_rows_and_nan_for_none():
    entropy = torch.tensor([[3.0, 1.0, 9.0], [7.0, 1.0, 9.0], [1.0, 2.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]])
    got = threshold_p95(entropy, mask, window=1)
    assert got[0].item() == 1.0 and got[2].item() == 1.0 and got[1].isnan()
    many = torch.arange(ROWS_PER_CHUNK + 2.0)[:, None].expand(-1, 500)
    assert torch.equal(threshold_p95(many, torch.ones_like(many)), many[:, 0])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_an_empty_batch_has_empty_windows(shape):
    empty = torch.zeros(shape)
    assert window_entropy(empty, empty).shape == shape
    assert hwe_mask(empty, threshold=1.0).shape == shape
    got = threshold_p95(empty, empty)
    assert got.shape == shape[:1] and got.isnan().all()


def test_windows_longer_than_the_row_are_nan_and_mark_nothing():
    short = torch.ones(2, 3)
    assert window_entropy(short, short, window=5).isnan().all()
    assert not hwe_mask(torch.full((2, 3), math.nan), threshold=0.0, window=5).any()
    assert threshold_p95(short, short, window=5).tolist() == [1.0, 1.0]


def test_windows_without_tokens_are_refused():
    grid = torch.ones(2, 3)
    for call in (window_entropy, threshold_p95):
        with pytest.raises(InputError) as caught:
            call(grid, grid, window=0)
        assert (caught.value.name, caught.value.got) == ("window", 0)
    with pytest.raises(InputError) as caught:
        hwe_mask(grid, threshold=0, window=0)
    assert (caught.value.name, caught.value.got) == ("window", 0)
