"""Ranks of any model as small Ray actors in place of Megatron, and the batch that they answer for.

The module imports little, because each actor's process imports it.
"""

import os
import time
from types import SimpleNamespace

import numpy as np
import ray
import torch

from mega_agentrl.batch.packed_rows import PackedScores
from mega_agentrl.types.batch import TrainBatch, UpdateStats


@ray.remote(num_cpus=0)
class FakeRank:
    """Data-parallel rank of two.

    Log-probs are minus the token ids, references ten less; a value is half of its token, the score
    of a row the sum of its tokens.
    """

    def __init__(self, rank, dies_in=""):
        self.rank, self.dies_in = rank, dies_in
        self.reset()

    def reset(self):
        """Forget all calls."""
        self.methods, self.args = [], None

    def call(self, method, *args):
        self.methods.append(method)
        self.args = args
        if method == self.dies_in:
            os._exit(1)
        return getattr(self, method, lambda *_: None)(*args)

    def compute_log_probs(self, shard, reference):
        logp_M = -response_tokens(shard.rows) - np.float32(10 if reference else 0)
        return PackedScores(
            row_R=shard.rows.row_R, values=(logp_M, np.full_like(logp_M, self.rank))
        )

    def compute_values(self, shard):
        return PackedScores(row_R=shard.rows.row_R, values=(response_tokens(shard.rows) / 2,))

    def compute_scores(self, shard):
        rows = shard.rows
        if not rows.num_rows:
            raise OSError("lost its GPU")
        # The appended token is a 0.
        sums_R = np.add.reduceat(response_tokens(rows), rows.response_start_R1[:-1])
        return PackedScores(row_R=rows.row_R, values=(sums_R,))

    def update(self, shard, *scored):
        rows = shard.gather_rows(*(scored or [None]))
        self.args = len(shard.new_rows.token_N), rows.token_N
        self.updated = SimpleNamespace(rows=rows, args=self.args)
        stats = {"loss": float(self.rank), "grad_norm": 1.0, "learning_rate": 0.0}
        return UpdateStats(**stats, num_tokens=1, num_skipped_steps=0, metrics={})

    sft_step = update

    def update_scores(self):
        self.args = self.updated.args
        return self.compute_log_probs(self.updated, reference=False)

    def export_hf(self, folder):
        raise OSError("disk full")

    def load_checkpoint(self, folder):
        if folder.endswith("damaged"):
            raise ValueError(f"checkpoint {folder}: data has 3 bytes, expected 4")
        return {"step": 7, "from": folder}

    def start_save(self, folder):
        return f"manifest of rank {self.rank}"

    def save_result(self, wait_s):
        """Return the rank's file; rank 1 is done only if it is waited for."""
        return {f"__{self.rank}_0.distcp": self.rank} if wait_s or not self.rank else None

    def find_free_address(self):
        return "127.0.0.1", 1

    def start(self, host, port):
        self.methods.append(f"start {host}:{port}")

    def visible_gpus(self):
        return str(4 + self.rank)

    def recorded_methods(self):
        return self.methods

    def last_args(self):
        return self.args


def response_tokens(rows):
    """Return the response tokens of all rows, float32."""
    sequences = rows.sequences(range(rows.num_rows))
    return np.concatenate(
        [
            tokens[length:].astype(np.float32)
            for tokens, length in zip(sequences, rows.prompt_length_R, strict=True)
        ]
    )


def batch():
    """Return three rows of two tokens each."""
    zeros = torch.zeros(3, 2)
    return TrainBatch(
        prompt_ids=((1,), (2,), (3,)),
        response_BT=torch.tensor([[1, 2], [3, 4], [5, 6]]),
        length_B=torch.tensor([2, 2, 2]),
        mask_BT=torch.ones(3, 2, dtype=torch.bool),
        group_B=torch.tensor([0, 0, 1]),
        reward_B=torch.zeros(3),
        tree_token_BT=torch.arange(6).view(3, 2),
        rollout_logp_BT=zeros,
        rollout_entropy_BT=zeros,
        version_BT=torch.zeros(3, 2, dtype=torch.int64),
    )


def wait_until_dead(method):
    """Call a method of an actor that was killed until Ray knows of the death."""
    try:
        while True:  # calls still get through for a moment
            ray.get(method.remote(), timeout=300)
            time.sleep(0.02)
    except ray.exceptions.RayActorError:
        return
