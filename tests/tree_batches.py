"""Batches of rollout trees with random tokens, and random shapes of trees."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import torch
from hypothesis import strategies as st

from mega_agentrl.batch.tree_order import order_rows
from mega_agentrl.types.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """A tree: its prompt's length, and of each row its parent, fork length and new tokens."""

    prompt_length: int
    rows: tuple[tuple[int | None, int, int], ...]
    """(earlier row or None, number of its response tokens that are shared, number of new ones)."""


FORKED_TREES = (
    # Two roots; a fork of a fork; a fork right after the prompt.
    TreeShape(prompt_length=5, rows=((None, 0, 7), (0, 3, 6), (1, 5, 2), (None, 0, 3))),
    TreeShape(prompt_length=1, rows=((None, 0, 12),)),
    # A fork from the end of its parent, and one that adds nothing.
    TreeShape(prompt_length=3, rows=((None, 0, 2), (0, 2, 4), (1, 6, 0))),
)


@st.composite
def tree_shapes(draw, max_rows=6, max_tokens=9):
    """Draw one to three trees, with single rows, forks of forks and rows without new tokens."""
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        rows, lengths = [], []
        for number in range(draw(st.integers(1, max_rows))):
            parent = draw(st.none() | st.integers(0, number - 1)) if number else None
            shared = 0 if parent is None else draw(st.integers(0, lengths[parent]))
            new = draw(st.integers(0 if shared else 1, max_tokens))
            rows.append((parent, shared, new))
            lengths.append(shared + new)
        trees.append(TreeShape(prompt_length=draw(st.integers(1, 6)), rows=tuple(rows)))
    return tuple(trees)


def make_tree_batch(trees=FORKED_TREES, *, vocab=61, seed=3) -> TrainBatch:
    """Return a batch of trees; masks, old log-probs and advantages differ from row to row.

    Rows that share a token need not agree on anything but the token, as when one of them failed.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts, responses, ids, groups = [], [], [], []
    num_tokens = 0

    def new_tokens(count):
        nonlocal num_tokens
        num_tokens += count
        tokens = torch.randint(0, vocab, (count,), generator=generator).tolist()
        return tokens, list(range(num_tokens - count, num_tokens))

    for group, tree in enumerate(trees):
        prompt, prompt_ids = new_tokens(tree.prompt_length)
        first = len(responses)
        for parent, shared, count in tree.rows:
            tokens, token_ids = new_tokens(count)
            if parent is not None:
                tokens = responses[first + parent][:shared] + tokens
                token_ids = ids[first + parent][: len(prompt) + shared] + token_ids
            else:
                token_ids = prompt_ids + token_ids
            prompts.append(tuple(prompt))
            responses.append(tokens)
            ids.append(token_ids)
            groups.append(group)
    length_B = torch.tensor([len(tokens) for tokens in responses])
    num_rows, width = len(responses), int(length_B.max())
    response_BT = torch.zeros(num_rows, width, dtype=torch.int64)
    tree_token_BT = torch.full((num_rows, width), -1)
    for row, (tokens, token_ids) in enumerate(zip(responses, ids, strict=True)):
        response_BT[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        tree_token_BT[row, : len(tokens)] = torch.tensor(
            token_ids[len(prompts[row]) :], dtype=torch.int64
        )
    order, shared_lengths = order_rows(ids)
    inside_BT = torch.arange(width) < length_B[:, None]
    noise_BT = torch.randn(num_rows, width, generator=generator)
    return TrainBatch(
        prompt_ids=tuple(prompts),
        response_BT=response_BT,
        length_B=length_B,
        mask_BT=(torch.rand(num_rows, width, generator=generator) < 0.8) & inside_BT,
        group_B=torch.tensor(groups),
        reward_B=torch.zeros(num_rows),
        tree_token_BT=tree_token_BT,
        rollout_logp_BT=torch.zeros(num_rows, width),
        rollout_entropy_BT=torch.zeros(num_rows, width),
        version_BT=torch.zeros(num_rows, width, dtype=torch.int64),
        old_logp_BT=-4.0 + 0.3 * noise_BT,
        ref_logp_BT=-4.0 - 0.3 * noise_BT,
        advantage_BT=torch.randn(num_rows, 1, generator=generator).expand(-1, width).clone(),
        tree_order_B=torch.tensor(order),
        shared_length_B=torch.tensor(shared_lengths),
    )


def single_branches(start_G):
    """Return the branches of trees of one row each, which begin at these packed tokens."""
    from mega_agentrl.actor.model.attention_plan import Branch  # not for tests without Megatron

    return tuple(Branch(start=start, stop=stop, path=()) for start, stop in pairwise(start_G))


def tree_params(start_G, branches=None, *, context_rank=0, context_size=1, device="cpu"):
    """Return the attention's parameters of a context rank; by default each tree is one row."""
    from mega_agentrl.actor.model.packed_attention import PackedTreeParams
    from mega_agentrl.actor.parallel.context_parallel import rank_token_indices

    branches = single_branches(start_G) if branches is None else branches
    position_W = torch.cat(
        [
            torch.arange(branch.stop - branch.start) + sum(b - a for a, b in branch.path)
            for branch in branches
        ]
    )
    held_S = rank_token_indices(start_G, context_rank, context_size)
    return PackedTreeParams.from_micro_batch(
        SimpleNamespace(
            start_G=tuple(start_G),
            branches=tuple(branches),
            position_S=position_W[held_S].to(device),
            context_rank=context_rank,
            context_size=context_size,
        )
    )


def paths_of(branches):
    """Return for each packed token the packed tokens from the root of its tree to itself."""
    paths = []
    for branch in branches:
        path = [token for start, stop in branch.path for token in range(start, stop)]
        for token in range(branch.start, branch.stop):
            path = [*path, token]
            paths.append(path)
    return paths
