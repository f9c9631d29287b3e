"""Bounds the micro-batches of a policy rank from the configuration.

A micro-batch has at most `optim.micro_batch_tokens` tokens on each rank, where tokens that rows
share count once. Two sizes grow with the number of rows instead. First, the losses see one row for
each trajectory, padded to T positions, and all rows of a data rank may be in one micro-batch if
they share nearly all of their tokens. Second, the attention gathers the keys of every branch along
its path: a token is a key once for each row that contains it, so that there are at most as many
keys as in flat rows, and at most as many as tokens times rows of a tree.

The bounds assume that all data ranks train on equally many prompts. In fact they are balanced by
cost, so that a rank with cheaper trees may have more prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from mega_agentrl.reshard.layout import round_up

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchBounds:
    """Upper bounds, which are reached if every trajectory has its full length."""

    tokens: int
    """Tokens of a micro-batch on one rank; tokens that rows share count once."""
    num_micro_batches: int
    """Micro-batches of a data rank in an optimizer step."""
    num_rows: int
    """Rows of a data rank in an optimizer step, which may all be in one micro-batch."""
    num_keys: int
    """Keys along the paths of trees on one rank, which a layer's attention gathers unless its
    kernel needs no gathered keys (`model.tree_attention`); 0 if no tree has a fork."""


def max_row_tokens(config: TrainConfig) -> int:
    """Return the number of tokens of the longest possible trajectory."""
    if config.rollout.source_of_contexts:
        return config.engine.max_model_len
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def bound_micro_batches(config: TrainConfig, tokens: int | None = None) -> MicroBatchBounds:
    """Return the bounds of a run's micro-batches.

    Args:
        config: The run.
        tokens: Tokens of the largest micro-batch on one rank; None for the largest possible.
    """
    layout, row_tokens = config.parallel, max_row_tokens(config)
    num_prompts, tree_rows = _prompts_per_minibatch(config), _rows_per_tree(config)
    num_rows = ceil(num_prompts * tree_rows)
    rank_rows = max(1, ceil(num_rows / layout.data))
    if tokens is None:
        budget = config.optim.micro_batch_tokens
        tokens = max(1, min(budget, ceil(rank_rows * row_tokens / layout.context)))
    rows_per_micro_batch = max(1, config.optim.micro_batch_tokens * layout.context // row_tokens)
    num_micro_batches = ceil(rank_rows / rows_per_micro_batch)
    multiple = layout.pipeline if layout.virtual_pipeline > 1 else 1
    num_trees = ceil(num_prompts / layout.data)
    if config.batch.trees:
        rank_rows = min(num_rows, num_trees * tree_rows)
    return MicroBatchBounds(
        tokens=tokens,
        num_micro_batches=round_up(num_micro_batches, multiple),
        num_rows=rank_rows,
        num_keys=_max_path_keys(config, tokens, rank_rows, num_trees),
    )


def _max_path_keys(config: TrainConfig, tokens: int, num_rows: int, num_trees: int) -> int:
    """Return `MicroBatchBounds.num_keys` for these tokens, rows and trees of a micro-batch."""
    tree_rows, context = _rows_per_tree(config), config.parallel.context
    if not config.batch.trees or tree_rows == 1:
        return 0
    # A context rank has two chunks of a tree, and may have a branch in both.
    num_cuts = 1 if context > 1 else 0
    by_tokens = (tree_rows + num_cuts) * tokens * context
    return min(by_tokens, (num_rows + num_cuts * num_trees) * max_row_tokens(config))


def _prompts_per_minibatch(config: TrainConfig) -> float:
    """Return the largest number of prompts of an optimizer step; below 1 if prompts are divided."""
    num_prompts = config.data.prompts_per_step / config.optim.num_minibatches
    return num_prompts if num_prompts < 1 else ceil(num_prompts)


def _rows_per_tree(config: TrainConfig) -> int:
    rollout = config.rollout
    return rollout.group_size * (rollout.max_turns if rollout.source_of_contexts else 1)
