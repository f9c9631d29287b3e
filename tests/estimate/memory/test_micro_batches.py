"""Bounds on tokens, rows and gathered keys of a micro-batch, by hand."""

from __future__ import annotations

import pytest

from mega_agentrl.estimate.memory.micro_batches import bound_micro_batches, max_row_tokens
from tests.estimate.configs import configured


def bounds(**settings):
    """Bounds of 64 prompts x 16 rows of 8,192 tokens; `minibatches`, `trees` and sizes."""
    minibatches, trees = settings.pop("minibatches", 1), settings.pop("trees", True)
    config = configured(**settings)
    config.optim.num_minibatches, config.batch.trees = minibatches, trees
    return bound_micro_batches(config)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (8192, 1024)),
        ({"tokens": 20_000}, (20_000, 512)),
        ({"tokens": 4096, "context": 2}, (4096, 1024)),
        ({"data": 4, "tokens": 10**7}, (256 * 8192, 1)),
        ({"pipeline": 3, "virtual_pipeline": 2, "tokens": 16384}, (16384, 513)),
    ],
)
def test_micro_batches_are_counted_for_full_rows(settings, expected):
    found = bounds(**settings)
    assert (found.tokens, found.num_micro_batches) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1024),
        ({"data": 4}, 256),
        ({"minibatches": 4, "data": 4}, 64),
        # 22 of the 64 prompts, of which a rank has 6.
        ({"minibatches": 3}, 22 * 16),
        ({"minibatches": 3, "data": 4}, 6 * 16),
        ({"minibatches": 3, "data": 4, "trees": False}, 22 * 16 // 4),
        # Two optimizer steps for each prompt, and fewer prompts than ranks.
        ({"minibatches": 128}, 8),
        ({"minibatches": 64, "data": 4}, 16),
        ({"minibatches": 64, "data": 4, "trees": False}, 4),
    ],
)
def test_rows_are_those_of_whole_prompts(settings, expected):
    assert bounds(**settings).num_rows == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 16 rows that share nearly all of the micro-batch's 8,192 tokens, or of 20,000.
        ({}, 16 * 8192),
        ({"tokens": 20_000}, 16 * 20_000),
        # No more than flat rows have: 8 rows of 8,192 tokens.
        ({"minibatches": 128, "tokens": 20_000}, 8 * 8192),
        # 2 x 4,096 tokens; a context rank may have two pieces of a branch.
        ({"tokens": 4096, "context": 2}, 17 * 8192),
        ({"trees": False}, 0),
    ],
)
def test_a_token_is_a_key_of_every_row_of_its_tree_at_most(settings, expected):
    assert bounds(**settings).num_keys == expected


def test_a_group_of_one_row_has_no_fork():
    config = configured()
    config.rollout.group_size = 1
    assert bound_micro_batches(config).num_keys == 0


def test_keys_are_bounded_by_the_tokens_that_were_measured():
    assert bound_micro_batches(configured(), 100).num_keys == 16 * 100


def test_rows_of_single_turns_are_more_and_as_long_as_the_context_of_an_engine():
    config = configured(prompt=100, response=100)
    config.engine.max_model_len, config.rollout.max_turns = 300, 3
    assert max_row_tokens(config) == 200
    config.rollout.use_inference_chat_template = True
    assert max_row_tokens(config) == 300
    assert bound_micro_batches(config).num_rows == 1024 * 3
