"""Training in bfloat16, as on GPUs, from the optimizer to the engine's log-probs.

Ray starts two data-parallel policy ranks, which share the float32 master weights of a mixture of
experts between them, and a vLLM engine. Weights go from the one to the other as in a run, with
digests and the probe, which `tests/actor/test_weight_probe` has alone. `tests.bfloat16` says how
far both may lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm")

from mega_agentrl.config.enums import Dtype
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig, ParallelConfig
from mega_agentrl.config.sections.runtime import ClusterConfig, EngineConfig
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.reshard.verify.weight_probe import probe_prompt
from mega_agentrl.types.records import GenerateRequest
from tests.bfloat16 import exact_logits, exact_scores, explained_difference, median_gap
from tests.generator.tiny_model import write_tokenizer
from tests.tiny_models import SIZES, make_tiny_model
from tests.train_batches import batch_of_generations

if TYPE_CHECKING:
    from pathlib import Path

    from mega_agentrl.runtime.weight_sync import WeightSynchronizer
    from mega_agentrl.runtime.workers.generator_group import GeneratorGroup
    from mega_agentrl.runtime.workers.policy_group import PolicyGroup

VOCAB = SIZES["vocab_size"]
PROMPT = probe_prompt(VOCAB, 32)
NUM_LAYERS = 2
# What vLLM's kernels for CPUs can do.
CHANGES = {"num_hidden_layers": NUM_LAYERS, "head_dim": 32, "moe_intermediate_size": 32}


@dataclass
class Chain:
    """Policy, engine and what sends the weights of the one to the other."""

    policy: PolicyGroup
    engines: GeneratorGroup
    weight_sync: WeightSynchronizer
    folder: Path
    """Model folder that both have started with."""
    version: int = 0

    def sync(self) -> dict[str, float]:
        """Send the policy's weights as the next version."""
        self.version += 1
        return self.weight_sync.sync([0], self.version, None)

    def ask_engine(self, method: str, *args: Any) -> Any:
        import ray

        return ray.get(self.engines.submit(method, *args, engines=[0])["engine 0"], timeout=500)

    def policy_log_probs(self) -> list[float]:
        """Return the policy's log-probs of the prompt."""
        answers = self.policy.call_all("compute_prompt_log_probs", PROMPT)
        return next(answer for answer in answers if answer is not None)

    def generate(self) -> list[tuple[GenerateRequest, Any]]:
        """Return requests of several lengths with their generations."""
        requests = [
            GenerateRequest(
                request_id=f"{number}",
                token_ids=tuple(PROMPT[number : 2 * number + 4]),
                max_tokens=24,
                seed=number,
            )
            for number in range(8)
        ]
        return [(request, self.ask_engine("generate", request)) for request in requests]

    def exported(self, folder: Path) -> Path:
        """Write the policy's weights and return their folder."""
        self.policy.export_hf(folder)
        return folder


@pytest.fixture(scope="module")
def chain(ray_local, tmp_path_factory):
    from mega_agentrl.runtime.weight_sync import WeightSynchronizer
    from mega_agentrl.runtime.workers.generator_group import GeneratorGroup
    from mega_agentrl.runtime.workers.placement import Placement
    from mega_agentrl.runtime.workers.policy_group import PolicyGroup

    root = tmp_path_factory.mktemp("bfloat16")
    folder = make_tiny_model("qwen3_moe", root / "model", eos_token_id=2, **CHANGES)
    write_tokenizer(folder, VOCAB)
    config = TrainConfig(
        model=ModelConfig(path=str(folder), dtype=Dtype.bfloat16),
        parallel=ParallelConfig(data=2),
        engine=EngineConfig(max_model_len=128, cpu_kv_cache_gib=1, max_num_seqs=8),
        cluster=ClusterConfig(call_timeout_s=500),
    )
    placement = Placement(config, on_gpu=False, with_engines=True)
    launch = {"on_gpu": False, "log_folder": root, "placement": placement}
    engines = GeneratorGroup.launch(config, **launch)
    starting = engines.submit_start()
    policy = PolicyGroup.launch(config, **launch)
    policy.start()
    engines.wait_started(starting)
    weight_sync = WeightSynchronizer(policy, engines, config, dtype=str(config.model.dtype))
    chain = Chain(policy, engines, weight_sync, folder)
    chain.sync()  # the first transfer compiles what copies weights
    yield chain
    weight_sync.disconnect()
    engines.close()
    policy.close()
    placement.release()


def bound_of(folder, rows=(PROMPT,)):
    """Return the bound for a model's log-probs of some rows of tokens."""
    return explained_difference(NUM_LAYERS, torch.cat([exact_logits(folder, r) for r in rows]))


@pytest.mark.slow(55)
def test_a_transfer_takes_two_bytes_a_weight_and_both_sides_score_alike(chain):
    report = chain.sync()
    shapes = hf_shapes(ModelShape.from_folder(chain.folder)).values()
    assert report["bytes_per_worker"] == 2 * sum(int(np.prod(shape)) for shape in shapes)
    bound = bound_of(chain.folder)
    assert 0 < report["probe_gap"] < bound
    expected, _ = exact_scores(chain.folder, PROMPT)
    assert median_gap(chain.policy_log_probs(), expected) < bound
    assert median_gap(chain.ask_engine("compute_prompt_log_probs", PROMPT), expected) < bound


@pytest.mark.slow(3)
def test_log_probs_and_entropies_of_sampled_tokens_agree(chain):
    pairs = chain.generate()
    batch = chain.policy.compute_log_probs(batch_of_generations(pairs))
    mask_BT = batch.mask_BT
    assert mask_BT.sum() > 100
    rows = [(*request.token_ids, *got.token_ids) for request, got in pairs]
    bound = bound_of(chain.folder, rows)
    assert median_gap(batch.old_logp_BT[mask_BT], batch.rollout_logp_BT[mask_BT]) < bound
    assert median_gap(batch.entropy_BT[mask_BT], batch.rollout_entropy_BT[mask_BT]) < bound
    assert batch.rollout_entropy_BT[mask_BT].std() > 5 * bound


def share_off_the_grid(logits):
    """Return the share of differences that logits rounded to bfloat16 cannot have.

    Rounded logits of at least 1/8 are multiples of 2^-10, and so are their differences.
    """
    steps = torch.as_tensor(logits).diff() * 2**10
    return ((steps - steps.round()).abs() > 0.05).float().mean().item()


@pytest.mark.slow(3)
def test_the_engines_logits_are_not_rounded(chain):
    # The log-probs after the same token differ as the logits do.
    first, *others = PROMPT
    logps = [chain.ask_engine("compute_prompt_log_probs", [first, token])[0] for token in others]
    assert share_off_the_grid(logps) > 0.6
    logits = exact_logits(chain.folder, PROMPT)[0, others]
    assert share_off_the_grid(logits.bfloat16().float()) < 0.4


def large_weights(folder):
    """Return the weights whose distance to the next number in bfloat16 is at least 2^-10."""
    tensors = load_file(folder / "model.safetensors").items()
    initial = {name: value.bfloat16().float() for name, value in tensors if value.ndim > 1}
    return {name: (value, value.abs() > 1 / 8) for name, value in initial.items()}


@pytest.mark.slow(6)
def test_steps_below_the_resolution_add_up_in_the_masters_and_arrive(chain, tmp_path):
    batch = batch_of_generations(chain.generate())
    initial = large_weights(chain.folder)

    def sft_step(lr):
        shards = chain.policy._sender.send_demonstrations(batch)
        chain.policy.call_data_ranks("sft_step", shards, lr)

    def share_moved(folder):
        after = load_file(folder / "model.safetensors")
        moved = [(after[name].float() != old)[large] for name, (old, large) in initial.items()]
        return torch.cat(moved).float().mean().item()

    before = chain.ask_engine("compute_prompt_log_probs", PROMPT)
    # Adam moves a weight by about the learning rate, here a tenth of the distance.
    sft_step(1e-4)
    assert share_moved(chain.exported(tmp_path / "one")) == 0
    for _ in range(19):
        sft_step(1e-4)
    assert share_moved(chain.exported(tmp_path / "twenty")) > 0.5

    for _ in range(2):
        sft_step(3e-2)
    trained = chain.exported(tmp_path / "trained")
    report = chain.sync()
    bound = bound_of(trained)
    assert 0 < report["probe_gap"] < bound
    after = chain.ask_engine("compute_prompt_log_probs", PROMPT)
    assert median_gap(after, exact_scores(trained, PROMPT)[0]) < bound
    assert median_gap(after, before) > 3 * bound
