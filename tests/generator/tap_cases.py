"""Checks of the entropy tap's kernel, in Triton's interpreter and on a GPU.

``python tap_cases.py`` runs them on a CPU, in a process of its own, where TRITON_INTERPRET=1 can be
set before the kernel is imported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from mega_agentrl.generator.entropy_tap import tap_sampler


@dataclass
class V2Sampler:
    """Samples token 0 as the V2 runner's sampler does, which changes a copy of the logits only."""

    temperatures: list[float]
    has_logprobs: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.sampling_states = SimpleNamespace(
            temperature=SimpleNamespace(gpu=torch.tensor(self.temperatures, device=self.device))
        )

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        sampled = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        tensors = LogprobsTensors(
            sampled[:, None], torch.zeros(len(logits), 1, device=logits.device), sampled + 1
        )
        return SimpleNamespace(
            sampled_token_ids=sampled[:, None],
            logprobs_tensors=tensors if self.has_logprobs else None,
        )


def step_of(slots: list[int], device: str = "cpu") -> Any:
    """Return the part of a step's batch that the tap reads; row i belongs to `slots[i]`."""
    index = torch.tensor(slots, dtype=torch.int32, device=device)
    return SimpleNamespace(expanded_idx_mapping=index)


def measured(
    logits_RV: torch.Tensor, sampled: list[int], temperatures: list[float], slots: list[int]
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return log-probs, entropies, and the most probable tokens; checks that all signs are set."""
    from mega_agentrl.generator.entropy_kernel import measure_sampled

    device = logits_RV.device
    # The sampled ids are a column, as in vLLM.
    sampled_R = torch.tensor([[token, -1] for token in sampled], device=device)[:, 0]
    bits_R, argmax_R = measure_sampled(
        logits_RV,
        sampled_R,
        torch.tensor(temperatures, device=device),
        torch.tensor(slots, dtype=torch.int32, device=device),
    )
    assert (bits_R < 0).all()
    value_R2 = bits_R.cpu().numpy().view(np.float32).reshape(-1, 2)
    return value_R2[:, 0], np.abs(value_R2[:, 1]), argmax_R.tolist()


def values_are_those_of_float64(device: str) -> None:
    """Rows of any width, dtype, offset and temperature, some of whose tokens are forbidden."""
    from mega_agentrl.generator.entropy_kernel import BLOCK

    generator = torch.Generator().manual_seed(3)
    temperatures, slots = [1.0, 0.2, 3.0, 0.0], [3, 1, 2, 0, 1]
    offset_R = torch.tensor([0.0, -300.0, 4.0, 1e4, 30.0])[:, None]
    for width in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77):
        for dtype in (torch.float32, torch.bfloat16):
            # A view of wider rows, which begin at any address.
            wide = torch.randn(5, width + 3, generator=generator) * 5 + offset_R
            logits_RV = wide.to(dtype)[:, :width].to(device)
            logits_RV[0, 1::2] = -math.inf
            sampled = [0, *torch.randint(width, (4,), generator=generator).tolist()]
            logp_R, entropy_R, argmax = measured(logits_RV, sampled, temperatures, slots)
            divisor_R = torch.tensor([temperatures[slot] or 1.0 for slot in slots])
            exact_RV = logits_RV.cpu().double() / divisor_R.double()[:, None]
            exact_RV = exact_RV.log_softmax(-1)
            np.testing.assert_allclose(logp_R, exact_RV[range(5), sampled], rtol=2e-6, atol=2e-5)
            exact_R = torch.special.entr(exact_RV.exp()).sum(-1)
            np.testing.assert_allclose(entropy_R, exact_R, rtol=2e-6, atol=2e-5)
            for row, token in enumerate(argmax):
                assert logits_RV[row, token] == logits_RV[row].max()


def a_certain_token_has_entropy_zero_and_ties_go_to_the_first(device: str) -> None:
    """Also where the other tokens are in other blocks, and where a lane never meets a token."""
    from mega_agentrl.generator.entropy_kernel import BLOCK

    logits_RV = torch.full((3, 3 * BLOCK), -math.inf, device=device)
    logits_RV[0, 2 * BLOCK + 7] = -50.0
    logits_RV[1, [5, BLOCK + 3, 2 * BLOCK + 4]] = 2.0
    logits_RV[2, [BLOCK + 9, 2 * BLOCK + 9]] = torch.tensor([1.0, 0.0], device=device)
    sampled = [2 * BLOCK + 7, BLOCK + 3, 0]
    logp_R, entropy_R, argmax = measured(logits_RV, sampled, [1.0], [0, 0, 0])
    p = 1 / (1 + math.exp(-1))
    binary = -p * math.log(p) - (1 - p) * math.log(1 - p)
    np.testing.assert_allclose(logp_R, [0, -math.log(3), -math.inf], rtol=1e-6)
    np.testing.assert_allclose(entropy_R, [0, math.log(3), binary], rtol=1e-6)
    assert argmax == [2 * BLOCK + 7, 5, BLOCK + 9]


def rows_are_measured_at_the_temperature_of_their_slot(device: str) -> None:
    """With the rows of one tensor rank, too, which are some of the slots in any order."""
    binary = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    for slots in ([2, 0], [1, 2], [0, 1]):
        temperatures = [1.0, 0.5, 0.0]
        sampler = tap_sampler(V2Sampler(temperatures, device=device))
        scale = temperatures[slots[1]] or 1.0
        logits = torch.tensor([[3.0, 3.0], [0.0, scale * math.log(3.0)]], device=device)
        output = sampler(logits, step_of(slots, device))
        tensors = output.logprobs_tensors
        value_R2 = tensors.selected_token_ranks.cpu().numpy().view(np.float32).reshape(-1, 2)
        expected = [[math.log(0.5), -math.log(2)], [math.log(0.25), -binary]]
        np.testing.assert_allclose(value_R2, expected, rtol=1e-6)
        assert tensors.logprob_token_ids.tolist() == [[0], [1]]
        assert output.sampled_token_ids.tolist() == [[0], [0]]


CHECKS = (
    values_are_those_of_float64,
    a_certain_token_has_entropy_zero_and_ties_go_to_the_first,
    rows_are_measured_at_the_temperature_of_their_slot,
)

if __name__ == "__main__":
    for check in CHECKS:
        check("cpu")
        print(check.__name__, "passed")
