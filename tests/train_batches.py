"""Train batches made of token ids or generations, or cut to some of their rows."""

from dataclasses import fields

import torch

from mega_agentrl.data.sft_dataset import Demonstration, collate_demonstrations
from mega_agentrl.types.batch import TrainBatch, UpdateScores


def batch_of_rows(token_RT, num_prompt, lengths=None):
    """Rows of token ids as a batch; every token behind the prompt is trained on.

    Args:
        token_RT: [rows, tokens] ids of prompts and responses.
        num_prompt: number of tokens of each prompt.
        lengths: lengths of the responses; None takes all tokens.
    """
    rows = token_RT.tolist()
    lengths = lengths or [len(row) - num_prompt for row in rows]
    return collate_demonstrations(
        [
            Demonstration(
                tuple(row[:num_prompt]), tuple(row[num_prompt : num_prompt + length]), (1,) * length
            )
            for row, length in zip(rows, lengths, strict=True)
        ]
    )


def select_rows(batch, rows):
    """Return a validated batch of the given rows in the given order; T does not change."""
    values = {spec.name: getattr(batch, spec.name) for spec in fields(batch)}
    picked = {name: value[list(rows)] for name, value in values.items() if hasattr(value, "dtype")}
    prompt_ids = tuple(batch.prompt_ids[row] for row in rows)
    return batch.with_fields(**picked, prompt_ids=prompt_ids).validate()


def batch_of_generations(pairs):
    """Requests and their generations as a batch; every sampled token is trained on."""
    size = len(pairs)
    lengths = [len(got.token_ids) for _, got in pairs]
    tensors = {
        name: torch.zeros(size, max(lengths), dtype=kind)
        for name, kind in (
            ("response_BT", torch.int64), ("mask_BT", torch.bool), ("tree_token_BT", torch.int64),
            ("version_BT", torch.int64), ("rollout_logp_BT", torch.float32),
            ("rollout_entropy_BT", torch.float32),
        )
    }  # fmt: skip
    for row, (_, got) in enumerate(pairs):
        here = slice(0, lengths[row])
        tensors["response_BT"][row, here] = torch.tensor(got.token_ids)
        tensors["rollout_logp_BT"][row, here] = torch.tensor(got.logps)
        tensors["rollout_entropy_BT"][row, here] = torch.tensor(got.entropies)
        tensors["mask_BT"][row, here] = True
    return TrainBatch(
        prompt_ids=tuple(request.token_ids for request, _ in pairs),
        length_B=torch.tensor(lengths),
        group_B=torch.arange(size),
        reward_B=torch.zeros(size),
        **tensors,
    )


def update_scores(batch, gap=0.0):
    """Return the scores of an update whose log-probs differ by `gap` from the engine's.

    None if the batch was scored before.
    """
    if batch.old_logp_BT is not None:
        return None
    return UpdateScores(
        logp_BT=batch.rollout_logp_BT + gap,
        entropy_BT=batch.rollout_entropy_BT,
        is_scored_B=torch.ones(batch.num_rows, dtype=torch.bool),
    )
