"""An engine's log-probs without vLLM: transformers in bfloat16 with a float32 head.

`WRONG_MAPPINGS` has what a wrong name mapping does: the right bytes, each in a wrong place.
`lose_rotary_frequencies` has what an engine may lose that no weight update brings back.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def load_engine(folder: Path) -> Any:
    """Load the model of a folder in bfloat16."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@torch.no_grad()
def with_wrong_mapping(model: Any, wrong_mapping: Callable[[Any], None]) -> Any:
    """Return a copy of a model with weights in wrong places."""
    wrong = copy.deepcopy(model)
    wrong_mapping(wrong)
    return wrong


@torch.no_grad()
def engine_log_probs(model: Any, prompt: Sequence[int]) -> list[float]:
    """Return the log-probs of a prompt's tokens after the first, from float32 logits."""
    token_T = torch.tensor(prompt)
    hidden_TD = model.model(token_T[None]).last_hidden_state[0, :-1]
    logp_TV = (hidden_TD.float() @ model.lm_head.weight.float().T).log_softmax(-1)
    logps: list[float] = logp_TV.gather(1, token_T[1:, None]).squeeze(1).tolist()
    return logps


def _exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    values = one.clone()
    one.copy_(other)
    other.copy_(values)


def _gate_and_up(model: Any) -> None:
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            _exchange(*layer.mlp.experts.gate_up_proj.chunk(2, dim=1))
        else:
            _exchange(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight)


def _key_and_value(model: Any) -> None:
    for layer in model.model.layers:
        _exchange(layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight)


def _query_heads(model: Any) -> None:
    """Move each head of every layer to the place of the next."""
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        weight.copy_(weight.roll(layer.self_attn.head_dim, 0))


def _layers(model: Any) -> None:
    """Exchange the first two layers."""
    first, second = (dict(layer.named_parameters()) for layer in model.model.layers[:2])
    for name, weight in first.items():
        _exchange(weight, second[name])


def _embedding_rows(model: Any) -> None:
    weight = model.model.embed_tokens.weight
    weight.copy_(weight.roll(1, 0))


def _experts(model: Any) -> None:
    """Move each expert of every layer to the place of the next."""
    for layer in model.model.layers:
        for weight in layer.mlp.experts.parameters():
            weight.copy_(weight.roll(1, 0))


WRONG_MAPPINGS: dict[str, Callable[[Any], None]] = {
    "gate and up": _gate_and_up,
    "key and value": _key_and_value,
    "query heads": _query_heads,
    "layers": _layers,
    "embedding rows": _embedding_rows,
    "experts": _experts,
}


def lose_rotary_frequencies(model: Any) -> None:
    """Forget the values of a tensor that is no parameter, as a sleep can."""
    model.model.rotary_emb.inv_freq.zero_()
