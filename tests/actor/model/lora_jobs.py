"""Jobs of the tests of adapters, run on each rank of a layout."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.actor.megatron_model import RankInfo
from mega_agentrl.actor.policy import PolicyRank
from mega_agentrl.config.errors import ConfigError
from tests.actor.rank_saves import save_checkpoint
from tests.parallel.policy_jobs import gradients_before_step, weights_of
from tests.rank_shards import score, sft_step, update

if TYPE_CHECKING:
    from pathlib import Path

    from mega_agentrl.actor.megatron_model import MegatronModel
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.batch import TrainBatch, UpdateStats
    from tests.parallel.policy_jobs import Blocks

Scores = tuple[list[int], torch.Tensor, torch.Tensor] | None


@dataclass(slots=True, kw_only=True)
class Adapted:
    """Results of one rank with adapters of the same random values in every layout."""

    fresh: Scores
    """Scores with new adapters."""
    scores: Scores
    reference: Scores
    """Scores of the reference, which is the model with new adapters."""
    stats: UpdateStats
    """Stats of an update with learning rate 0."""
    gradients: Blocks
    """Its gradients, of the adapters."""
    adapters: Blocks
    """Values of the adapters."""
    losses: list[float]
    """Losses of supervised steps."""
    frozen: bool
    """Whether these left the weights as they were."""
    num_state_elements: int
    """Elements of the moments and master weights of this rank."""


def train_adapters(
    rank_info: dict[str, Any], config: TrainConfig, batch: TrainBatch, folder: Path
) -> Adapted:
    """Score, take gradients, export the merged weights to `folder`, save, and train on."""
    policy = PolicyRank(config, RankInfo(**rank_info))
    model = policy.megatron_model
    policy.load_hf(config.model.path)
    policy.set_objective(config.algo, config.rollout.temperature)
    fresh = score(policy, "compute_log_probs", batch)
    fill(model)
    scores = score(policy, "compute_log_probs", batch)
    reference = score(policy, "compute_log_probs", batch, True)
    stats, gradients = update_without_step(policy, batch)
    adapters = weights_of(model)
    policy.export_hf(str(folder / "merged"))
    before = [value.clone() for value in weights(model)]
    losses = [sft_step(policy, batch, 1e-2).loss for _ in range(3)]
    save_checkpoint(policy, folder / "checkpoint")
    frozen = all(map(torch.equal, before, weights(model)))
    num_state_elements = sum(
        values[kind].numel()
        for _, _, values in model.optimizer.state_shards()
        for kind in ("exp_avg", "exp_avg_sq")
    )
    policy.close()
    return Adapted(
        fresh=fresh,
        scores=scores,
        reference=reference,
        stats=stats,
        gradients=gradients,
        adapters=adapters,
        losses=losses,
        frozen=frozen,
        num_state_elements=num_state_elements,
    )


def resume_adapters(
    rank_info: dict[str, Any], config: TrainConfig, batch: TrainBatch, folder: Path
) -> tuple[Blocks, float]:
    """Load a checkpoint; return its adapters and the loss of the next supervised step."""
    policy = PolicyRank(config, RankInfo(**rank_info))
    policy.load_hf(config.model.path)
    policy.load_checkpoint(str(folder / "checkpoint"))
    model = policy.megatron_model
    adapters = weights_of(model)
    policy.export_hf(str(folder / f"resumed-{config.parallel.pipeline}"))
    loss = sft_step(policy, batch, 1e-2).loss
    policy.close()
    return adapters, loss


def start_from_peft(rank_info: dict[str, Any], config: TrainConfig) -> Blocks:
    """Return the adapters of a new policy."""
    policy = PolicyRank(config, RankInfo(**rank_info))
    policy.load_hf(config.model.path)
    model = policy.megatron_model
    adapters = weights_of(model)
    policy.close()
    return adapters


def peft_refusal(rank_info: dict[str, Any], config: TrainConfig) -> tuple[str, object] | None:
    """Return key and value of the setting with which a new policy refuses its adapters."""
    policy = PolicyRank(config, RankInfo(**rank_info))
    try:
        policy.load_hf(config.model.path)
    except ConfigError as error:
        return error.key, error.got
    finally:
        policy.close()
    return None


@torch.no_grad()
def fill(model: MegatronModel) -> None:
    """Give the adapters random values that depend on their name and place alone."""
    for shard in model.adapter_layouts:
        (block,) = shard.blocks
        digest = hashlib.blake2b(block.hf_name.encode(), digest_size=6).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        full = 0.3 * torch.randn(model.state_shapes[block.hf_name], generator=generator)
        model.parameters[shard.name].copy_(full[block.hf_rect.slices])
    model.optimizer.reload_master_weights()


def update_without_step(policy: PolicyRank, batch: TrainBatch) -> tuple[UpdateStats, Blocks]:
    """Return the stats and the gradients before clipping of an update with learning rate 0."""
    with gradients_before_step(policy.megatron_model) as caught:
        stats = update(policy, batch, lr=0.0)
    return stats, caught[0]


def weights(model: MegatronModel) -> list[torch.Tensor]:
    """Return the weights without adapters."""
    return [model.parameters[shard.name].detach() for shard in model.shard_layouts]


def full_gradients(
    rank_info: dict[str, Any], config: TrainConfig, batch: TrainBatch
) -> tuple[Scores, Blocks, UpdateStats]:
    """Return scores and gradients of all weights of a model without adapters."""
    policy = PolicyRank(config, RankInfo(**rank_info))
    policy.load_hf(config.model.path)
    scores = score(policy, "compute_log_probs", batch)
    stats, gradients = update_without_step(policy, batch)
    policy.close()
    return scores, gradients, stats
