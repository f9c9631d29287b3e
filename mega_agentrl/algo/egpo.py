"""EGPO (arXiv 2508.05118): add the entropy of the chain of thought to the group advantage.

    A_i + lam * clip(H_i, -|A_i| / alpha, |A_i| / alpha)

H_i is the mean token entropy in nats over the chain of thought of trajectory i. Entropies are not
negative, so the bonus lies between 0 and lam |A| / alpha: with lam < alpha no advantage changes its
sign, and groups of equal rewards, where A = 0, get no bonus.

The chain of thought is located among the tokens that the policy sampled, so a tool that prints a
marker has no effect. It extends from the first start marker to the first end marker after it,
without the markers; from the beginning if there is only an end marker, or if the generation prompt
ends with a start marker (`opened_turns`); to the end if the block is not closed; it is empty
without markers. With `blocks="all"` the rule applies to each assistant turn (a run of unmasked
positions), and the result is the union.

B trajectories, T response positions; R rows of a chunk, S turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mega_agentrl.algo.masking import map_row_chunks, masked_mean, shift
from mega_agentrl.algo.shape_checks import check_same_shape
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

COT_BLOCKS = ("first", "all")

MAX_TOKENS_BEHIND_OPENING = 2
"""Tokens, such as line breaks, that a template writes between a start marker and the turn. A tool's
answer ends further away: the beginning of the policy's turn stands behind it."""


def egpo(
    advantage_B: torch.Tensor,
    cot_entropy_B: torch.Tensor,
    *,
    lam: float = 0.4,
    alpha: float = 2.0,
) -> torch.Tensor:
    """Return the advantage with the entropy bonus, [B]; no gradient to the entropies.

    Args:
        advantage_B: [B] GRPO advantage.
        cot_entropy_B: [B] mean entropy of the chain of thought in nats, from `cot_entropy`.
        lam: weight of the bonus, at least 0. If it is at least `alpha`, advantages may change their
            sign; this is not checked here.
        alpha: divisor of the bound on the entropy, above 0.

    Raises:
        ValueError: `lam` or `alpha` is out of range.
    """
    check_same_shape(advantage_B=advantage_B, cot_entropy_B=cot_entropy_B)
    if lam < 0:
        raise InputError("lam", lam, "at least 0")
    if alpha <= 0:
        raise InputError("alpha", alpha, "above 0")
    bound_B = advantage_B.abs() / alpha
    entropy_B = cot_entropy_B.detach().to(advantage_B.dtype)
    return advantage_B + lam * torch.minimum(torch.maximum(entropy_B, -bound_B), bound_B)


def cot_entropy(entropy_BT: torch.Tensor | None, cot_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean entropy over the chain of thought in nats, 0 if it is empty, [B].

    Args:
        entropy_BT: [B, T] token entropies of the current policy in nats, from the log-prob pass.
        cot_BT: [B, T] result of `cot_mask`.

    Raises:
        ValueError: the entropies are None or not finite under the mask.
    """
    if entropy_BT is None:
        expected = "the entropies of the log-prob pass, for which EGPO has no substitute"
        raise InputError("entropy_BT", None, expected, "the pass ran without entropies")
    check_same_shape(entropy_BT=entropy_BT, cot_BT=cot_BT)
    mean_B = masked_mean(entropy_BT.detach(), cot_BT, dim=1)
    if not bool(mean_B.isfinite().all()):
        bad = int((~mean_B.isfinite()).sum())
        got = f"values that are not finite in {bad} of {len(mean_B)} chains of thought"
        raise InputError("entropy_BT", got, "finite ones", "missing entropies filled with NaN")
    return mean_B


def cot_mask(
    token_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    start_id: int | Sequence[int],
    end_id: int | Sequence[int],
    blocks: str = "first",
    opened_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return which sampled tokens belong to the chain of thought, [B, T] bool.

    Args:
        token_BT: [B, T] integer token ids.
        mask_BT: [B, T] mask of the sampled tokens.
        start_id: start marker, one token or several.
        end_id: end marker, one token or several.
        blocks: `first` for the trajectory's first block, which may continue after a tool's answer;
            `all` for one block per assistant turn.
        opened_BT: [B, T] mask of the first tokens of turns whose block is already open, from
            `opened_turns`; None if there are none.

    Raises:
        ValueError: a marker is empty or `blocks` is unknown.
    """
    if opened_BT is None:
        opened_BT = torch.zeros_like(mask_BT)
    check_same_shape(token_BT=token_BT, mask_BT=mask_BT, opened_BT=opened_BT)
    start, end = _marker_ids("start_id", start_id), _marker_ids("end_id", end_id)
    if blocks not in COT_BLOCKS:
        raise InputError("blocks", blocks, f"one of {', '.join(COT_BLOCKS)}")

    def cot_mask_of_rows(
        token_RT: torch.Tensor, mask_RT: torch.Tensor, opened_RT: torch.Tensor
    ) -> torch.Tensor:
        mask_RT = mask_RT.bool()
        turn_RT = _turn_index(mask_RT) if blocks == "all" else torch.zeros_like(token_RT)
        in_block_RT = _in_cot_block(token_RT, mask_RT, turn_RT, opened_RT.bool(), start, end)
        return mask_RT & in_block_RT

    return map_row_chunks(cot_mask_of_rows, token_BT.long(), mask_BT, opened_BT)


def opened_turns(
    token_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    start_id: int | Sequence[int],
    end_id: int | Sequence[int],
) -> torch.Tensor:
    """Return the first tokens of the turns whose block the generation prompt has opened, [B, T].

    Many chat templates end the generation prompt with the start marker and a line break. The policy
    then writes the end marker alone, and no marker at all if it is cut off.

    Args:
        token_BT: [B, T] integer token ids. A row must begin with the last tokens of the prompt, at
            least `MAX_TOKENS_BEHIND_OPENING` more than the start marker has.
        mask_BT: [B, T] mask of the sampled tokens.
        start_id: start marker, one token or several.
        end_id: end marker, one token or several.
    """
    check_same_shape(token_BT=token_BT, mask_BT=mask_BT)
    start, end = _marker_ids("start_id", start_id), _marker_ids("end_id", end_id)
    unsampled_BT = ~mask_BT.bool()
    opens_BT = _marker_starts(token_BT, unsampled_BT, start)
    closes_BT = _marker_starts(token_BT, unsampled_BT, end)
    is_open_BT = shift(opens_BT, len(start))
    opened_BT = is_open_BT
    for _ in range(MAX_TOKENS_BEHIND_OPENING):
        is_open_BT = shift(is_open_BT & unsampled_BT & ~closes_BT, 1)
        opened_BT = opened_BT | is_open_BT
    return opened_BT & ~unsampled_BT


def _marker_ids(name: str, marker: int | Sequence[int]) -> tuple[int, ...]:
    ids = (marker,) if isinstance(marker, int) else tuple(marker)
    if not ids:
        cause = "the model's tokenizer has no such marker"
        raise InputError(name, ids, "at least one token id", cause)
    return ids


def _turn_index(mask_RT: torch.Tensor) -> torch.Tensor:
    """Return the turn index from 0, [R, T]; masked positions belong to the turn before them."""
    is_start_RT = mask_RT & ~shift(mask_RT, 1)
    return (is_start_RT.cumsum(1) - 1).clamp(min=0)


def _in_cot_block(
    token_RT: torch.Tensor,
    mask_RT: torch.Tensor,
    turn_RT: torch.Tensor,
    opened_RT: torch.Tensor,
    start: tuple[int, ...],
    end: tuple[int, ...],
) -> torch.Tensor:
    """Return whether each position lies in the block of its turn, [R, T] bool.

    Args:
        token_RT: [R, T] token ids.
        mask_RT: [R, T] bool mask of the sampled tokens.
        turn_RT: [R, T] index of each position's turn; all 0 to treat a row as one turn.
        opened_RT: [R, T] bool, the first tokens of turns whose block is already open.
        start: token ids of the start marker.
        end: token ids of the end marker.
    """
    width = token_RT.shape[1]
    position_T = torch.arange(width, device=token_RT.device)
    num_turns = int(turn_RT.amax()) + 1 if turn_RT.numel() else 1

    def first_in_turn(is_marker_RT: torch.Tensor) -> torch.Tensor:
        """Return the position of the first marker in each position's turn; T if it has none."""
        marker_RT = torch.where(is_marker_RT, position_T, width)
        if num_turns == 1:
            first_R1 = torch.nn.functional.pad(marker_RT, (0, 1), value=width).amin(1, keepdim=True)
            return first_R1.expand_as(turn_RT)
        empty_RS = marker_RT.new_full((len(marker_RT), num_turns), width)
        return empty_RS.scatter_reduce(1, turn_RT, marker_RT, "amin").gather(1, turn_RT)

    open_RT = first_in_turn(_marker_starts(token_RT, mask_RT, start))
    first_RT = first_in_turn(mask_RT)
    # A policy that repeats the marker at once opens the block itself.
    is_opened_RT = (first_in_turn(opened_RT) == first_RT) & (first_RT < width)
    is_opened_RT = is_opened_RT & (open_RT != first_RT)
    has_start_RT = is_opened_RT | (open_RT < width)
    begin_RT = torch.where(has_start_RT & ~is_opened_RT, open_RT + len(start), 0)
    close_RT = first_in_turn(_marker_starts(token_RT, mask_RT, end) & (position_T >= begin_RT))
    has_block_RT = has_start_RT | (close_RT < width)
    return has_block_RT & (position_T >= begin_RT) & (position_T < close_RT)


def _marker_starts(
    token_RT: torch.Tensor, mask_RT: torch.Tensor, marker: tuple[int, ...]
) -> torch.Tensor:
    """Return where a marker starts of which every token is in the mask, [R, T] bool."""
    is_start_RT = torch.ones_like(mask_RT)
    for offset, token in enumerate(marker):
        is_start_RT = is_start_RT & shift((token_RT == token) & mask_RT, -offset)
    return is_start_RT
