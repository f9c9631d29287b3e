"""Advantages by a function of the user's own, `algo.advantage=/folder/file.py:function`.

    def advantage(batch: TrainBatch, algo: AlgoConfig) -> torch.Tensor:    # [B, T]

It gets the batch with everything that rollout, rewards and the log-prob pass filled in, and gives a
number for each token; those of tokens that are not trained on are not looked at. It runs on the
driver, in the loop's own process.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING

import torch

from mega_agentrl.types.own_code import find

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.config.algo_schema import AlgoConfig
    from mega_agentrl.types.batch import TrainBatch

DEFAULT_NAME = "advantage"
_EXPECTED = "a function of (batch, algo) that returns a tensor [B, T]"


@cache
def load(path: str) -> Callable[[TrainBatch, AlgoConfig], torch.Tensor]:
    """The function; raises `ValueError` where there is none, or one of other arguments."""
    where = f"algo.advantage={path}"
    name, found = find(path, where, DEFAULT_NAME)
    if not callable(found):
        raise ValueError(  # noqa: TRY004
            f"{where}: got {found!r} for {name}, expected {_EXPECTED}; probable cause: a mistyped "
            "name"
        )
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"{where}: got {name}{inspect.signature(found)}, expected {_EXPECTED}; {error}"
        ) from error
    function: Callable[[TrainBatch, AlgoConfig], torch.Tensor] = found
    return function


def own_advantage(batch: TrainBatch, algo: AlgoConfig) -> torch.Tensor:
    """[B, T] float32, 0 where nothing is trained on.

    Raises `ValueError` for a result of another kind or shape, or that is not finite on a trained
    token.
    """
    where, shape = f"algo.advantage={algo.advantage}", tuple(batch.mask_BT.shape)
    found = load(algo.advantage)(batch, algo)
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape:
        got = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ValueError(
            f"{where}: returned {got}, expected a tensor of shape {shape}; probable cause: an "
            "advantage of whole trajectories, which [:, None] and an expand_as spread over tokens"
        )
    advantage_BT = torch.where(batch.mask_BT, found.detach().float(), 0.0)
    if num_bad := int((~advantage_BT.isfinite()).sum()):
        raise ValueError(
            f"{where}: returned {num_bad} numbers that are not finite for trained tokens, expected "
            "none; probable cause: a division by the spread of equal rewards"
        )
    return advantage_BT
