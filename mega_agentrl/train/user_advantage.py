"""Load and call a user's advantage function, `algo.advantage=/folder/file.py:function`.

    def advantage(batch: TrainBatch, algo: AlgoConfig) -> torch.Tensor:    # [B, T]

The function gets the batch as the rollout, the rewards and the log-prob pass have filled it, and
returns one number per token. Values on untrained tokens are ignored. It runs on the driver, in the
process of the training loop.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING

import torch

from mega_agentrl.types.user_code import load_user_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.config.sections.algo import AlgoConfig
    from mega_agentrl.types.batch import TrainBatch

DEFAULT_FUNCTION_NAME = "advantage"
_EXPECTED_SIGNATURE = "a function of (batch, algo) that returns a tensor [B, T]"


@cache
def load_user_advantage(path: str) -> Callable[[TrainBatch, AlgoConfig], torch.Tensor]:
    """Load and check the function.

    Raises:
        ValueError: There is no such function, or it does not take (batch, algo).
    """
    where = f"algo.advantage={path}"
    name, loaded = load_user_object(path, where, DEFAULT_FUNCTION_NAME)
    if not callable(loaded):
        raise ValueError(  # noqa: TRY004
            f"{where}: got {loaded!r} for {name}, expected {_EXPECTED_SIGNATURE}; "
            "probable cause: a mistyped name"
        )
    try:
        inspect.signature(loaded).bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"{where}: got {name}{inspect.signature(loaded)}, expected {_EXPECTED_SIGNATURE}; "
            f"{error}"
        ) from error
    function: Callable[[TrainBatch, AlgoConfig], torch.Tensor] = loaded
    return function


def compute_user_advantage(batch: TrainBatch, algo: AlgoConfig) -> torch.Tensor:
    """Return the user's advantages, [B, T] float32, 0 on untrained tokens.

    Raises:
        ValueError: The result is no tensor of shape [B, T], or is not finite on a trained token.
    """
    where, shape = f"algo.advantage={algo.advantage}", tuple(batch.mask_BT.shape)
    advantage = load_user_advantage(algo.advantage)(batch, algo)
    if not isinstance(advantage, torch.Tensor) or tuple(advantage.shape) != shape:
        got = (
            tuple(advantage.shape)
            if isinstance(advantage, torch.Tensor)
            else type(advantage).__name__
        )
        raise ValueError(
            f"{where}: returned {got}, expected a tensor of shape {shape}; probable cause: an "
            "advantage of whole trajectories, which [:, None] and an expand_as spread over tokens"
        )
    advantage_BT = torch.where(batch.mask_BT, advantage.detach().float(), 0.0)
    if num_bad := int((~advantage_BT.isfinite()).sum()):
        raise ValueError(
            f"{where}: returned {num_bad} numbers that are not finite for trained tokens, expected "
            "none; probable cause: a division by the spread of equal rewards"
        )
    return advantage_BT
