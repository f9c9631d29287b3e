"""The single-process reference: transformers in float32, torch's autograd, torch's AdamW.

Rows are scored one at a time, without padding and without sharing anything. The batch of all
layouts has forked trees, and a row without a trained token; its old and reference log-probs lie
around those of the model, so that the clip range cuts some tokens on either side and not the
others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.algo.kl import kl_penalty
from mega_agentrl.algo.policy_loss import aggregate, clipped
from mega_agentrl.config.algorithm_traits import LOSSES
from mega_agentrl.types.batch import TrainBatch
from tests.tiny_models import SIZES, make_tiny_model
from tests.tree_batches import make_tree_batch

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

PROMPTS = (5, 1, 8, 3, 2, 6)
RESPONSES = (7, 12, 1, 5, 9, 4)
NUM_STEPS = 3
LR = 1e-2
TEMPERATURE = 1.3


def make_batch(seed: int = 3) -> TrainBatch:
    """Six rows that share nothing, one without a trained token, advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, width, vocab = len(PROMPTS), max(RESPONSES), SIZES["vocab_size"]
    response_BT = torch.zeros(num_rows, width, dtype=torch.int64)
    mask_BT = torch.zeros(num_rows, width, dtype=torch.bool)
    for row, length in enumerate(RESPONSES):
        response_BT[row, :length] = torch.randint(0, vocab, (length,), generator=generator)
        mask_BT[row, :length] = torch.rand(length, generator=generator) < 0.8
    mask_BT[3] = False
    noise_BT = torch.randn(num_rows, width, generator=generator)
    return TrainBatch(
        prompt_ids=tuple(
            tuple(torch.randint(0, vocab, (size,), generator=generator).tolist())
            for size in PROMPTS
        ),
        response_BT=response_BT,
        length_B=torch.tensor(RESPONSES),
        mask_BT=mask_BT,
        group_B=torch.tensor([0, 0, 0, 1, 1, 1]),
        reward_B=torch.zeros(num_rows),
        tree_token_BT=torch.zeros(num_rows, width, dtype=torch.int64),
        rollout_logp_BT=torch.zeros(num_rows, width),
        rollout_entropy_BT=torch.zeros(num_rows, width),
        version_BT=torch.zeros(num_rows, width, dtype=torch.int64),
        old_logp_BT=-4.0 + 0.3 * noise_BT,
        ref_logp_BT=-4.0 - 0.3 * noise_BT,
        advantage_BT=torch.randn(num_rows, 1, generator=generator).expand(-1, width).clone(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Expected results of a model on its batch, at TEMPERATURE."""

    folder: Path
    batch: TrainBatch
    logp_BT: torch.Tensor
    """`[B, T]`, 0 after the end of a row."""
    entropy_BT: torch.Tensor
    """`[B, T]`, 0 after the end of a row."""
    loss: float
    """Clipped loss with KL term and entropy bonus."""
    gradient: dict[str, torch.Tensor]
    """Gradient of `loss` by Hugging Face name, before clipping."""
    grad_norm: float
    curve: list[float]
    """Losses of NUM_STEPS SFT steps with torch's AdamW."""


def make_reference(name: str, folder: Path, config: TrainConfig) -> Reference:
    """Write the checkpoint `name` (one of `layouts.MODELS`) and compute the results."""
    family, _, tied = name.partition("-")
    make_tiny_model(family, folder, tied=bool(tied))
    model = load_model(folder)
    batch = make_tree_batch(vocab=SIZES["vocab_size"])
    batch.mask_BT[1] = False
    logp_BT, entropy_BT = score(model, batch, TEMPERATURE)
    own_BT, noise_BT = logp_BT.detach(), batch.old_logp_BT + 4.0
    batch = batch.with_fields(old_logp_BT=own_BT + noise_BT, ref_logp_BT=own_BT - noise_BT)
    loss = policy_loss(config, batch, logp_BT, entropy_BT)
    loss.backward()
    gradient = checkpoint_tensors(model, gradients=True)
    return Reference(
        folder=folder,
        batch=batch,
        logp_BT=own_BT,
        entropy_BT=entropy_BT.detach(),
        loss=loss.item(),
        gradient=gradient,
        grad_norm=math.sqrt(sum(float(value.square().sum()) for value in gradient.values())),
        curve=sft_curve(load_model(folder), batch, config),
    )


def load_model(folder: Path) -> Any:
    """Load the folder's model in float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def score(model: Any, batch: TrainBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[B, T]` log-prob and entropy of the response tokens, with gradients."""
    logp_BT = torch.zeros(batch.response_BT.shape)
    entropy_BT = torch.zeros(batch.response_BT.shape)
    for row, prompt in enumerate(batch.prompt_ids):
        length = int(batch.length_B[row])
        response = batch.response_BT[row, :length]
        tokens = torch.cat([torch.tensor(prompt), response])
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
        logp_TV = logits.log_softmax(-1)
        logp_BT[row, :length] = logp_TV.gather(1, response[:, None]).squeeze(1)
        entropy_BT[row, :length] = -(logp_TV.exp() * logp_TV).sum(-1)
    return logp_BT, entropy_BT


def policy_loss(
    config: TrainConfig, batch: TrainBatch, logp_BT: torch.Tensor, entropy_BT: torch.Tensor
) -> torch.Tensor:
    """Return the objective over the whole batch."""
    algo = config.algo
    defaults = {name: option.default for name, option in LOSSES.find(algo.loss).options.items()}
    loss_BT, _ = clipped(
        logp_BT,
        batch.old_logp_BT,
        batch.advantage_BT,
        batch.mask_BT,
        **(defaults | algo.loss_options),
    )
    loss_BT = loss_BT + algo.kl_coef * kl_penalty(
        logp_BT, batch.ref_logp_BT, str(algo.kl_estimator)
    )
    loss_BT = loss_BT - algo.entropy_coef * entropy_BT
    return aggregate(
        loss_BT,
        batch.mask_BT,
        str(algo.loss_aggregation),
        max_response_tokens=config.rollout.max_response_tokens,
    )


def sft_curve(model: Any, batch: TrainBatch, config: TrainConfig) -> list[float]:
    """Return the losses before each of NUM_STEPS SFT steps at temperature 1."""
    adam = adamw(model, config)
    losses = []
    for _ in range(NUM_STEPS):
        logp_BT, _ = score(model, batch, 1.0)
        loss = -logp_BT[batch.mask_BT].mean()
        losses.append(loss.item())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
        adam.step()
    return losses


def adamw(model: Any, config: TrainConfig) -> torch.optim.AdamW:
    """Create torch's AdamW with the configured betas; no weight decay for vectors."""
    optim = config.optim
    decayed = [value for value in model.parameters() if value.ndim > 1]
    spared = [value for value in model.parameters() if value.ndim == 1]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": optim.weight_decay},
            {"params": spared, "weight_decay": 0.0},
        ],
        lr=LR,
        betas=tuple(optim.betas),
        eps=1e-8,
    )


def checkpoint_tensors(model: Any, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Return parameters (or their gradients) under the names of the saved checkpoint.

    transformers holds the experts of a layer in two tensors, [E, 2F, D] and [E, D, F]; the
    checkpoint has three for each expert.
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if gradients else parameter.detach()
        layer, fused, kind = name.partition("mlp.experts.")
        if not fused:
            found[name] = value
            continue
        for expert, part in enumerate(value):
            start = f"{layer}{fused}{expert}."
            if kind == "gate_up_proj":
                gate, up = part.chunk(2)
                found |= {f"{start}gate_proj.weight": gate, f"{start}up_proj.weight": up}
            else:
                found[f"{start}{kind}.weight"] = part
    return found
