"""The actor in bfloat16 on one rank, with neither vLLM nor Ray: over NCCL on a GPU, else over gloo.

`tests.bfloat16` says how far its scores may lie from those of the exact computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from mega_agentrl.config.enums import Dtype
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.bfloat16 import exact_logits, exact_scores, explained_difference, median_gap
from tests.gpu.actor_jobs import step_around_offloading
from tests.gpu.gpus import FOUND, needs_gpus
from tests.parallel.policy_jobs import run_calls
from tests.parallel.reference import make_batch
from tests.tiny_models import SIZES, make_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from mega_agentrl.types.batch import TrainBatch

LR = 1e-2


@pytest.fixture(
    scope="module",
    params=["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, needs_gpus(1)])],
)
def backend(request):
    """The backend of `torch.distributed`, which the machine decides on."""
    if request.param == "gloo" and FOUND:
        pytest.skip("the actor uses this machine's GPU")


@dataclass
class Run:
    """A model, and what a rank returned that scored, trained, saved and exported it."""

    config: TrainConfig
    batch: TrainBatch
    root: Path
    results: dict[str, Any]

    def scores_of(self, folder: Path) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return exact log-probs and entropies of all response tokens, and the bound."""
        logps, entropies, logits = [], [], []
        for row, prompt in enumerate(self.batch.prompt_ids):
            response = self.batch.response_BT[row, : int(self.batch.length_B[row])].tolist()
            tokens, first = (*prompt, *response), len(prompt) - 1
            logp_T, entropy_T = exact_scores(folder, tokens)
            logps.append(logp_T[first:])
            entropies.append(entropy_T[first:])
            logits.append(exact_logits(folder, tokens)[first:])
        bound = explained_difference(SIZES["num_hidden_layers"], torch.cat(logits))
        return torch.cat(logps), torch.cat(entropies), bound

    def check_scores(self, name: str, folder: Path) -> None:
        """Compare the scores of a result with those of the weights in a folder."""
        rows, logp_BT, entropy_BT = self.results[name]
        expected_logp, expected_entropy, bound = self.scores_of(folder)
        order = torch.argsort(torch.tensor(rows))
        width = logp_BT.size(1)
        inside_BT = torch.arange(width)[None] < self.batch.length_B[:, None]
        assert median_gap(logp_BT[order][inside_BT], expected_logp) < bound
        assert median_gap(entropy_BT[order][inside_BT], expected_entropy) < bound


@pytest.fixture(
    scope="module", params=[pytest.param("qwen3", marks=pytest.mark.extended), "qwen3_moe"]
)
def run(request, backend, rank_pool, tmp_path_factory):
    root, batch = tmp_path_factory.mktemp(request.param), make_batch()
    folder = make_tiny_model(request.param, root / "model")
    config = TrainConfig(model=ModelConfig(path=str(folder), dtype=Dtype.bfloat16))
    config.optim.micro_batch_tokens = 24
    step = ("sft_step", batch, LR)
    calls = {
        "initial": ("compute_log_probs", batch),
        "step 1": step,
        "step 2": step,
        "save": ("save", str(root / "run/one")),
        "export": ("export_hf", str(root / "hf")),
        "trained": ("compute_log_probs", batch),
        "weights": ("weights",),
        "step 3": step,
        "step 4": step,
    }
    (results,) = rank_pool.run(run_calls, 1, config, list(calls.values()))
    return Run(config, batch, root, dict(zip(calls, results, strict=True)))


def test_scores_are_those_of_transformers(run):
    run.check_scores("initial", run.root / "model")


def test_training_continues_from_a_checkpoint(run, rank_pool):
    pytest.importorskip("msgspec")
    step = ("sft_step", run.batch, LR)
    calls = [("load_checkpoint", str(run.root / "run/one")), ("weights",), step, step]
    ((_, weights, *steps),) = rank_pool.run(run_calls, 1, run.config, calls)
    for (name, rect, value), (_, _, expected) in zip(weights, run.results["weights"], strict=True):
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, expected), (name, rect)
    losses = [run.results[f"step {number}"].loss for number in range(1, 5)]
    # Sums over a GPU's threads have no fixed order.
    assert [stats.loss for stats in steps] == pytest.approx(losses[2:], abs=2e-2)
    assert losses[3] < losses[0] - 0.3


def test_transformers_reads_the_exported_weights(run):
    tensors = load_file(run.root / "hf/model.safetensors")
    for name, rect, value in run.results["weights"]:
        assert torch.equal(tensors[name][rect.slices], value), name
    run.check_scores("trained", run.root / "hf")


def test_a_step_after_offloading_is_the_same_step(run, rank_pool):
    ((plain, turned, allocated),) = rank_pool.run(
        step_around_offloading, 1, run.config, run.batch, LR
    )
    assert turned.loss == pytest.approx(plain.loss, abs=2e-2 if FOUND else 0)
    assert turned.loss < run.results["step 1"].loss - 0.1
    if FOUND:
        sizes = hf_shapes(ModelShape.from_folder(run.config.model.path)).values()
        num_weights = sum(math.prod(size) for size in sizes)
        # A weight, its gradient, its master and two moments.
        freed = allocated["resident"] - allocated["offloaded"]
        assert freed > 0.95 * (2 + 4 * 4) * num_weights
