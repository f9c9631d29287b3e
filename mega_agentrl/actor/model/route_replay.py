"""Replay of recorded routes in the mixture-of-experts layers of a model.

A `RouteLog` goes through the model with its micro-batch. It holds the experts that each token is to
be sent to, and collects what the routers of this rank did. Each layer with experts has a
`ReplayRouter`, which Megatron's router asks in place of its top-k. The weights of the experts are
computed from the scores of the policy itself, so that the router gets gradients as usual. Tokens
whose routes are unknown, such as padding and the last token of a rollout, go where the policy's own
router sends them.

A recomputed layer finds its log again: the hook of the layer runs in both passes, and a layer that
recomputes its experts alone keeps the log for the second pass (`_keep_log`). A second pass
overwrites what the first one has collected.

Shape suffixes: S tokens of this rank, R those of them that its router sees (all, or a part under
sequence parallelism), L layers with experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer

from mega_agentrl.types.routes import DIGEST_BITS, RecordedRoutes, route_digests

if TYPE_CHECKING:
    from mega_agentrl.actor.parallel.process_groups import ParallelGroups


TokenPart = Callable[[torch.Tensor], torch.Tensor]
"""Selects from `[S, ...]` values those of the R tokens that a router sees."""


@dataclass(slots=True, kw_only=True, eq=False)
class RouteLog:
    """The routes of a micro-batch on one rank."""

    key_S: torch.Tensor
    """`[S]` int64 numbers that identify the tokens (`types.routes.token_keys`)."""
    row_S: np.ndarray
    """`[S]` int64 number of the first row of the micro-batch that contains each token; -1 for
    padding."""
    position_S: np.ndarray
    """`[S]` int64 position of each token in its row."""
    expert_SLK: torch.Tensor | None = None
    """`[S, L, K]` int16 experts to replay; -1 where they are unknown. None to replay nothing."""
    expected_digest: int = 0
    """Sum of the digests of these routes, as they came with the rollouts."""
    is_recording: bool = False
    """Whether to keep the experts that each router chooses."""
    chosen_RK: dict[int, torch.Tensor] = field(default_factory=dict)
    """`[R, K]` int64 experts by layer, if they are kept."""
    counts: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layer `[3]` int64: the tokens that were replayed, those of them that the policy would have
    sent to other experts, and the sum of the digests of all routes that were replayed."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int((self.row_S >= 0).sum())

    def recorded(self, part: TokenPart) -> RecordedRoutes:
        """Return the routes that were chosen, of the tokens that the routers of this rank saw."""
        key_R = part(self.key_S)
        layers = sorted(self.chosen_RK)
        expert_RLK = torch.stack([self.chosen_RK[layer] for layer in layers], dim=1)
        digests = [route_digests(key_R[:, None], layer, self.chosen_RK[layer]) for layer in layers]
        digest_R = torch.stack(digests).sum(dim=(0, 2)) % 2**DIGEST_BITS
        row_R, position_R = (
            part(torch.from_numpy(value_S)).numpy() for value_S in (self.row_S, self.position_S)
        )
        is_real_R = row_R >= 0
        return RecordedRoutes(
            row_N=row_R[is_real_R],
            position_N=position_R[is_real_R],
            layers=tuple(layers),
            expert_NLK=expert_RLK.cpu().numpy().astype(np.uint16)[is_real_R],
            digest_N=digest_R.cpu().numpy().astype(np.uint32)[is_real_R],
        )


class ReplayRouter:
    """Stands in for Megatron's `RouterReplay`: chooses the experts of one layer.

    Args:
        layer: Number of the layer among those with experts, in the whole model.
        part: The tokens that the router sees.
    """

    def __init__(self, layer: int, part: TokenPart) -> None:
        self.log: RouteLog | None = None
        self._layer = layer
        self._part = part

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[R, K]` scores and experts; the arguments are those of Megatron."""
        own_RK, index_RK = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        log = self.log
        if log is None:
            return own_RK, index_RK
        if log.expert_SLK is not None:
            index_RK = self._replay(log, log.expert_SLK, index_RK)
            own_RK = scores.gather(1, index_RK)
        if log.is_recording:
            log.chosen_RK[self._layer] = index_RK
        return own_RK, index_RK

    def _replay(
        self, log: RouteLog, expert_SLK: torch.Tensor, own_RK: torch.Tensor
    ) -> torch.Tensor:
        target_RK = self._part(expert_SLK[:, self._layer]).long()
        is_known_R = target_RK[:, 0] >= 0
        index_RK = torch.where(is_known_R[:, None], target_RK, own_RK)
        differs_R = (index_RK.sort(1).values != own_RK.sort(1).values).any(1)
        digest_RK = route_digests(self._part(log.key_S)[:, None], self._layer, index_RK)
        log.counts[self._layer] = torch.stack(
            [is_known_R.sum(), differs_R.sum(), digest_RK[is_known_R].sum()]
        )
        return index_RK


def router_part(groups: ParallelGroups, *, is_split: bool) -> TokenPart:
    """Return the function that selects the tokens that this rank's routers see.

    `is_split` is whether sequence parallelism splits them over the tensor ranks.
    """
    tensor = groups.pg_collection.tp

    def part(value_S: torch.Tensor) -> torch.Tensor:
        return value_S.chunk(tensor.size())[tensor.rank()]

    def whole(value_S: torch.Tensor) -> torch.Tensor:
        return value_S

    return part if is_split else whole


def install_replay(
    chunk: torch.nn.Module, moe_layer_pattern: tuple[bool, ...], groups: ParallelGroups
) -> None:
    """Give each layer with experts of a chunk its `ReplayRouter`, and the log of each pass.

    Args:
        chunk: A chunk of the model.
        moe_layer_pattern: One flag for each layer of the whole model: whether it has experts.
        groups: The process groups.
    """
    part = router_part(groups, is_split=chunk.config.sequence_parallel)
    for layer in chunk.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            number = sum(moe_layer_pattern[: layer.layer_number - 1])
            layer.mlp.router.router_replay = ReplayRouter(number, part)
            layer.register_forward_pre_hook(_hand_over_log, with_kwargs=True)
            _keep_log(layer.mlp)


def _hand_over_log(layer: Any, _: Any, inputs: dict[str, Any]) -> None:
    layer.mlp.router.router_replay.log = inputs["packed_seq_params"].route_log


def _keep_log(experts: MoELayer) -> None:
    """Let a layer of experts find the log of its micro-batch when they are recomputed."""
    # Megatron's recomputation would not know the micro-batch any more.
    recompute, experts.moe_layer_recompute = experts.moe_layer_recompute, False
    forward, replay = experts.forward, experts.router.router_replay

    def forward_with_log(hidden_R1D: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        log = replay.log

        def run(hidden_R1D: torch.Tensor) -> Any:
            replay.log = log
            return forward(hidden_R1D, *args, **kwargs)

        if recompute and torch.is_grad_enabled():
            return tensor_parallel.checkpoint(run, False, hidden_R1D)
        return run(hidden_R1D)

    experts.forward = forward_with_log
