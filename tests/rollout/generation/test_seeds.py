"""Request seeds are stable, in range, and differ by position."""

from __future__ import annotations

from mega_agentrl.rollout.generation.seeds import continuation_seed, request_seed


def test_a_known_value_never_moves():
    # A change here changes what every run samples.
    assert request_seed(1, "train-3", "toolqa_7", (0, 1), 2, 0) == 8716954078516794663


def test_every_part_of_the_place_counts():
    place = (1, 3, "p", (0,), 2, 0)
    others = [
        (2, 3, "p", (0,), 2, 0),
        (1, 4, "p", (0,), 2, 0),
        (1, "3", "p", (0,), 2, 0),
        (1, 3, "q", (0,), 2, 0),
        (1, 3, "p", (0, 0), 2, 0),
        (1, 3, "p", (0,), 3, 0),
        (1, 3, "p", (0,), 2, 1),
    ]
    assert len({request_seed(*each) for each in [place, *others]}) == len(others) + 1


def test_seeds_fill_the_range():
    seeds = [request_seed(0, step, "p", (0,), 0, 0) for step in range(200)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert 80 < sum(seed >= 2**62 for seed in seeds) < 120


def test_the_rest_of_a_request_has_a_seed_of_its_own():
    seeds = {continuation_seed(seed, num_tokens) for seed in (1, 2) for num_tokens in range(1, 9)}
    assert len(seeds | {1, 2}) == 18
    assert all(0 <= seed < 2**63 for seed in seeds)
