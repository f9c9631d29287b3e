"""EGPO (arXiv 2508.05118): the entropy of the reasoning added to the group advantage.

    A_i + lam * clip(H_i, -|A_i| / alpha, |A_i| / alpha)

H_i is the mean token entropy, in nats, over the chain of thought of trajectory i and nothing
else. Entropies are not negative, so what is added lies between 0 and lam |A| / alpha: with
lam < alpha no advantage changes its sign, and where the group earned equal rewards A = 0 and
nothing is added.

Where the chain of thought is, among the tokens the policy sampled (a tool that prints a marker
changes nothing): between the first opening marker and the first closing one behind it, markers
left out; from the start where only a closing one is there, because the template opened the
block; to the end where it is not closed; nowhere without markers. `blocks="all"` reads this rule
for each assistant turn, a turn being a run of unmasked positions, and takes the union.

B trajectories, T response positions; R rows at hand, S turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo.masking import masked_mean
from mega_agentrl.algo.scan import by_rows
from mega_agentrl.algo.shapes import same_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = ("first", "all")


def egpo(
    advantage_B: torch.Tensor,
    cot_entropy_B: torch.Tensor,
    *,
    lam: float = 0.4,
    alpha: float = 2.0,
) -> torch.Tensor:
    """[B] the advantage with its bonus; no gradient reaches the entropies.

    advantage_B: [B], GRPO's. cot_entropy_B: [B] nats, of `cot_entropy`. lam at or above alpha
    lets signs change; nothing here forbids it.
    """
    same_shape(advantage_B=advantage_B, cot_entropy_B=cot_entropy_B)
    if alpha <= 0 or lam < 0:
        raise ValueError(f"egpo: got lam={lam}, alpha={alpha}; expected lam >= 0 and alpha > 0")
    bound_B = advantage_B.abs() / alpha
    entropy_B = cot_entropy_B.detach().to(advantage_B.dtype)
    return advantage_B + lam * torch.minimum(torch.maximum(entropy_B, -bound_B), bound_B)


def cot_entropy(entropy_BT: torch.Tensor | None, cot_BT: torch.Tensor) -> torch.Tensor:
    """[B] mean entropy over the chain of thought, in nats; 0 where there is none.

    entropy_BT: [B, T] of the current policy, from the log-prob pass. cot_BT: of `cot_mask`.
    Raises `ValueError` where entropies are missing: None, or not finite under the mask.
    """
    if entropy_BT is None:
        raise ValueError(
            "entropy_BT: got None, expected the entropies of the log-prob pass; EGPO has no "
            "substitute for them; probable cause: the pass ran without entropies"
        )
    same_shape(entropy_BT=entropy_BT, cot_BT=cot_BT)
    mean_B = masked_mean(entropy_BT.detach(), cot_BT, dim=1)
    if not bool(mean_B.isfinite().all()):
        bad = int((~mean_B.isfinite()).sum())
        raise ValueError(
            f"entropy_BT: got entropies that are not finite in the reasoning of {bad} of "
            f"{len(mean_B)} trajectories, expected finite ones; probable cause: missing "
            "entropies filled with NaN"
        )
    return mean_B


def cot_mask(
    token_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    start_id: int | Sequence[int],
    end_id: int | Sequence[int],
    blocks: str = "first",
) -> torch.Tensor:
    """[B, T] bool: the tokens of the chain of thought that the policy sampled.

    token_BT: [B, T] integer token ids. start_id, end_id: the markers, of one token or several.
    blocks: `first`, the trajectory's first block, which may go on behind a tool's answer; `all`,
    one of each assistant turn. Raises `ValueError` for an empty marker.
    """
    same_shape(token_BT=token_BT, mask_BT=mask_BT)
    start, end = _marker("start_id", start_id), _marker("end_id", end_id)
    if blocks not in BLOCKS:
        raise ValueError(f"blocks={blocks}: expected one of {', '.join(BLOCKS)}")

    def rows(token_RT: torch.Tensor, mask_RT: torch.Tensor) -> torch.Tensor:
        on_RT = mask_RT.bool()
        turn_RT = _turns(on_RT) if blocks == "all" else torch.zeros_like(token_RT)
        return on_RT & _inside(token_RT, on_RT, turn_RT, start, end)

    return by_rows(rows, token_BT.long(), mask_BT)


def _marker(name: str, marker: int | Sequence[int]) -> tuple[int, ...]:
    ids = (marker,) if isinstance(marker, int) else tuple(marker)
    if not ids:
        raise ValueError(
            f"{name}: got an empty marker, expected at least one token id; probable cause: the "
            "model's tokenizer has no such marker"
        )
    return ids


def _turns(on_RT: torch.Tensor) -> torch.Tensor:
    """[R, T] the number of the turn, from 0; a masked position counts to the turn before it."""
    first_RT = on_RT & ~torch.nn.functional.pad(on_RT[:, :-1], (1, 0))
    return (first_RT.cumsum(1) - 1).clamp(min=0)


def _inside(
    token_RT: torch.Tensor,
    on_RT: torch.Tensor,
    turn_RT: torch.Tensor,
    start: tuple[int, ...],
    end: tuple[int, ...],
) -> torch.Tensor:
    """[R, T] bool: the position lies in its turn's block."""
    width = token_RT.shape[1]
    position_T = torch.arange(width, device=token_RT.device)
    num_turns = int(turn_RT.amax()) + 1 if turn_RT.numel() else 1

    def first_of_turn(there_RT: torch.Tensor) -> torch.Tensor:
        """The first marked position of the turn, for each of its positions; T for none."""
        place_RT = torch.where(there_RT, position_T, width)
        if num_turns == 1:
            least_R1 = torch.nn.functional.pad(place_RT, (0, 1), value=width).amin(1, keepdim=True)
            return least_R1.expand_as(turn_RT)
        empty_RS = place_RT.new_full((len(place_RT), num_turns), width)
        return empty_RS.scatter_reduce(1, turn_RT, place_RT, "amin").gather(1, turn_RT)

    open_RT = first_of_turn(_occurs(token_RT, on_RT, start))
    opened_RT = open_RT < width
    begin_RT = torch.where(opened_RT, open_RT + len(start), 0)
    close_RT = first_of_turn(_occurs(token_RT, on_RT, end) & (position_T >= begin_RT))
    found_RT = opened_RT | (close_RT < width)
    return found_RT & (position_T >= begin_RT) & (position_T < close_RT)


def _occurs(token_RT: torch.Tensor, on_RT: torch.Tensor, marker: tuple[int, ...]) -> torch.Tensor:
    """[R, T] bool: the marker starts here, and the policy sampled all of it."""
    there_RT = torch.ones_like(on_RT)
    for shift, token in enumerate(marker):
        hit_RT = (token_RT == token) & on_RT
        there_RT = there_RT & torch.nn.functional.pad(hit_RT[:, shift:], (0, shift))
    return there_RT
