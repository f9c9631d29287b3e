"""Settings of the policy: model, parallel layout, optimizer and supervised warm start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from mega_agentrl.config.enums import (
    Dtype,
    LoraTarget,
    LrSchedule,
    Recompute,
    RouterReplay,
    TreeAttention,
)
from mega_agentrl.config.errors import check_range
from mega_agentrl.config.ranges import MAX_STEPS, MAX_TOKENS, Length, Range, Section


@dataclass
class LoraConfig(Section, key="model.lora"):
    """Low-rank adapters, which are trained in place of the weights (arXiv 2106.09685)."""

    rank: Annotated[int, Range(at_least=0, at_most=4096)] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[float, Range(above=0, at_most=65_536)] = 32.0
    """The product of the factors is multiplied by alpha / rank."""
    targets: Annotated[list[LoraTarget], Length(at_least=1)] = field(
        default_factory=lambda: list(LoraTarget)
    )
    """Layers that get adapters; all of them by default."""
    path: str = ""
    """PEFT folder of adapters to start from; empty starts with new ones, which change nothing."""


@dataclass
class ModelConfig(Section, key="model"):
    """The model that is trained and its reference."""

    path: str = ""
    """Folder of the Hugging Face checkpoint that the run starts from; required."""
    reference_path: str = ""
    """Folder of the reference model of the KL term, of the same shape and vocabulary; empty uses
    the weights at the start of RL."""
    dtype: Dtype = Dtype.auto
    """Dtype of the weights in the forward pass, of the policy and of the engines. bfloat16 weights
    have float32 master copies in the optimizer; gradients and logits are always float32."""
    tree_attention: TreeAttention = TreeAttention.auto
    """Kernel of the attention, also of the critic and a reward model. With Transformer Engine it
    is used in micro-batches whose trees have forks (`batch.trees`)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    router_replay: RouterReplay = RouterReplay.sampled
    """Replay recorded experts when a mixture-of-experts model is trained, so that log-probs differ
    from those of the engine, or of the log-prob pass, by the update alone and not by experts that
    rounding has exchanged. The reference model uses its own experts. A model without experts has
    nothing to replay."""
    zero_mismatch: bool = False
    """Compute policy and engines in arithmetic that does not depend on batch, order or layout, so
    that their log-probs are equal bit by bit, which each step asserts. For dense text models in
    float32 on CPUs; a step takes two to four times as long. A run with it shows whether another
    one suffers from the mismatch of its kernels."""
    freeze_vision: bool = False
    """Leave the vision tower of a vision-language model as it is: it has no gradients and no
    optimizer state, and its activations are not kept. By default it is trained with the rest, as by
    verl's recipes."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Values for fields of megatron-core's `TransformerConfig` that no other setting sets, also of
    critic and reward model: `model.megatron.moe_permute_fusion=true`. The preflight does not know
    them."""

    @property
    def has_router_loss(self) -> bool:
        """Whether the experts' routers have a loss of their own, to which all tokens contribute."""
        return bool(self.megatron.get("moe_z_loss_coeff"))


@dataclass
class ParallelConfig(Section, key="parallel"):
    """Parallel layout of the policy on tensor * context * data * pipeline ranks."""

    tensor: Annotated[int, Range(at_least=1, at_most=1024, unit="ranks")] = 1
    """Tensor-parallel size."""
    pipeline: Annotated[int, Range(at_least=1, at_most=1024, unit="ranks")] = 1
    """Pipeline-parallel size. All stages have equally many layers; if that is impossible, the first
    and the last have one fewer."""
    virtual_pipeline: Annotated[int, Range(at_least=1, at_most=1024, unit="stages")] = 1
    """Virtual pipeline stages (model chunks) per pipeline rank; 1 is plain 1F1B."""
    data: Annotated[int, Range(at_least=1, at_most=65_536, unit="ranks")] = 1
    """Data-parallel size."""
    context: Annotated[int, Range(at_least=1, at_most=1024, unit="ranks")] = 1
    """Context-parallel size: ranks that share the tokens of a row."""
    expert: Annotated[int, Range(at_least=1, at_most=1024, unit="ranks")] = 1
    """Expert-parallel size; it divides tensor * context * data and adds no ranks."""
    expert_tensor: Annotated[int | None, Range(at_least=1, at_most=1024, unit="ranks")] = None
    """Tensor-parallel size within an expert; null is `parallel.tensor` if `parallel.expert` is 1,
    else 1."""
    sequence_parallel: bool = False
    """Split the activations between the linear layers along the sequence over the tensor ranks."""
    distributed_optimizer: bool = True
    """Shard master weights and optimizer moments over the data ranks instead of replicating
    them."""
    recompute: Recompute = Recompute.none
    """Activations of policy and critic that are computed again in the backward pass, which saves
    memory and costs time."""

    @property
    def world_size(self) -> int:
        """Number of policy ranks."""
        return self.tensor * self.context * self.data * self.pipeline

    def data_rank(self, rank: int) -> int:
        """Return the data rank of a global rank: ranks count tensor, context, data, pipeline."""
        return rank // (self.tensor * self.context) % self.data

    @property
    def expert_tensor_size(self) -> int:
        """`expert_tensor` with its default resolved."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return self.tensor if self.expert == 1 else 1


@dataclass
class OptimConfig(Section, key="optim"):
    """Adam optimizer, learning-rate schedule and batching of an update."""

    lr: Annotated[float, Range(at_least=0, at_most=10)] = 1e-6
    """Learning rate after the warm-up."""
    lr_schedule: LrSchedule = LrSchedule.constant
    """Decay from `optim.lr` to `optim.min_lr` at the end of the run."""
    lr_warmup_steps: Annotated[int, Range(at_least=0, at_most=MAX_STEPS, unit="steps")] = 0
    """Optimizer steps of linear learning-rate warm-up."""
    min_lr: Annotated[float, Range(at_least=0, at_most=10)] = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: Annotated[float, Range(at_least=0, at_most=100)] = 0.01
    """Weight decay."""
    betas: Annotated[list[float], Length(at_least=2, at_most=2), Range(at_least=0, below=1)] = (
        field(default_factory=lambda: [0.9, 0.999])
    )
    """Decay rates of Adam's moments."""
    grad_clip: Annotated[float, Range(above=0, at_most=1_000_000_000)] = 1.0
    """Maximum gradient norm."""
    micro_batch_tokens: Annotated[int, Range(at_least=1, at_most=MAX_TOKENS, unit="tokens")] = 16384
    """Token budget of one forward pass on one rank."""
    num_minibatches: Annotated[int, Range(at_least=1, at_most=1_000_000)] = 1
    """Optimizer steps per batch of rollouts."""
    critic_lr: Annotated[float, Range(at_least=0, at_most=10)] = 1e-5
    """Constant learning rate of the critic (`algo.advantage=gae`); its other settings are the
    policy's."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Values for fields of megatron-core's `OptimizerConfig` that no other setting sets:
    `optim.megatron.adam_eps=1e-6`."""
    critic_warmup_steps: Annotated[int, Range(at_least=0, at_most=MAX_STEPS, unit="steps")] = 0
    """RL steps at the start in which only the critic is updated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.min_lr <= self.lr, "optim.min_lr", self.min_lr, f"0 to optim.lr={self.lr}")


@dataclass
class BatchConfig(Section, key="batch"):
    """How rollouts become the rows that the policy trains on."""

    trees: bool = True
    """Compute tokens that trajectories share (the prompt, and everything before a fork) once
    instead of once per trajectory: less time and memory for the same loss and gradients."""


@dataclass
class SftConfig(Section, key="sft"):
    """Supervised warm start before RL."""

    max_steps: Annotated[int, Range(at_least=0, at_most=MAX_STEPS, unit="steps")] = 0
    """Maximum number of steps; 0 skips the warm start."""
    train_data: str = ""
    """Parquet or JSONL file of chat messages (column `messages`); required for a warm start."""
    dev_data: str = ""
    """File in the RL format on which the sampled success is measured; required for a warm
    start."""
    batch_size: Annotated[int, Range(at_least=1, at_most=1_000_000)] = 32
    """Conversations per step."""
    lr: Annotated[float, Range(at_least=0, at_most=10)] = 1e-3
    """Learning rate."""
    target_success_rate: Annotated[float, Range(above=0, at_most=1)] = 0.3
    """The warm start ends when the success on the first `evaluate.num_questions` dev questions
    reaches this rate and no data source is close to zero."""
