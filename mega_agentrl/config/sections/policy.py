"""Settings of the policy: model, parallel layout, optimizer and supervised warm start."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.enums import Dtype, LrSchedule
from mega_agentrl.config.errors import check_minimums, check_range


@dataclass
class ModelConfig:
    """The model that is trained and its reference."""

    path: str = ""
    """Folder of the Hugging Face checkpoint that the run starts from."""
    reference_path: str = ""
    """Folder of the reference model of the KL term, of the same shape and vocabulary; empty uses
    the weights at the start of RL."""
    dtype: Dtype = Dtype.auto
    """Dtype of the weights in the forward pass. bfloat16 weights have float32 master copies in the
    optimizer; gradients are always float32."""


@dataclass
class ParallelConfig:
    """Parallel layout of the policy on tensor * context * data * pipeline ranks."""

    tensor: int = 1
    """Tensor-parallel size."""
    pipeline: int = 1
    """Pipeline-parallel size."""
    virtual_pipeline: int = 1
    """Virtual pipeline stages (model chunks) per pipeline rank; 1 is plain 1F1B."""
    data: int = 1
    """Data-parallel size."""
    context: int = 1
    """Context-parallel size: ranks that share the tokens of a row."""
    expert: int = 1
    """Expert-parallel size; it divides tensor * context * data and adds no ranks."""
    expert_tensor: int | None = None
    """Tensor-parallel size within an expert; null is `parallel.tensor` if `parallel.expert` is 1,
    else 1."""
    sequence_parallel: bool = False
    """Split the activations between the linear layers along the sequence over the tensor ranks."""
    distributed_optimizer: bool = True
    """Shard master weights and optimizer moments over the data ranks instead of replicating
    them."""

    def __post_init__(self) -> None:
        check_minimums(
            self, "parallel", tensor=1, pipeline=1, virtual_pipeline=1, data=1, context=1, expert=1
        )
        if self.expert_tensor is not None:
            check_range(
                self.expert_tensor >= 1,
                "parallel.expert_tensor",
                self.expert_tensor,
                "at least 1, or null",
            )

    @property
    def world_size(self) -> int:
        """Number of policy ranks."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def expert_tensor_size(self) -> int:
        """`expert_tensor` with its default resolved."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return self.tensor if self.expert == 1 else 1


@dataclass
class OptimConfig:
    """Adam optimizer, learning-rate schedule and batching of an update."""

    lr: float = 1e-6
    """Learning rate after the warm-up."""
    lr_schedule: LrSchedule = LrSchedule.constant
    """Decay from `optim.lr` to `optim.min_lr` at the end of the run."""
    lr_warmup_steps: int = 0
    """Optimizer steps of linear learning-rate warm-up."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: float = 0.01
    """Weight decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of Adam's moments."""
    grad_clip: float = 1.0
    """Maximum gradient norm."""
    micro_batch_tokens: int = 16384
    """Token budget of one forward pass on one rank."""
    num_minibatches: int = 1
    """Optimizer steps per batch of rollouts."""
    critic_lr: float = 1e-5
    """Constant learning rate of the critic (`algo.advantage=gae`); its other settings are the
    policy's."""
    critic_warmup_steps: int = 0
    """RL steps at the start in which only the critic is updated."""

    def __post_init__(self) -> None:
        check_minimums(
            self,
            "optim",
            lr=0,
            lr_warmup_steps=0,
            critic_lr=0,
            critic_warmup_steps=0,
            micro_batch_tokens=1,
            num_minibatches=1,
        )
        check_range(
            0 <= self.min_lr <= self.lr, "optim.min_lr", self.min_lr, f"0 to optim.lr={self.lr}"
        )
        check_range(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "optim.betas",
            self.betas,
            "two numbers in [0, 1)",
        )
        check_range(self.grad_clip > 0, "optim.grad_clip", self.grad_clip, "above 0")


@dataclass
class SftConfig:
    """Supervised warm start before RL."""

    max_steps: int = 0
    """Maximum number of steps; 0 skips the warm start."""
    train_data: str = ""
    """Parquet or JSONL file of chat messages (column `messages`)."""
    dev_data: str = ""
    """File in the RL format on which the sampled success is measured."""
    batch_size: int = 32
    """Conversations per step."""
    lr: float = 1e-3
    """Learning rate."""
    target_success_rate: float = 0.3
    """The warm start ends when the success on the first `evaluate.num_questions` dev questions
    reaches this rate and no data source is close to zero."""

    def __post_init__(self) -> None:
        check_minimums(self, "sft", max_steps=0, batch_size=1)
        check_range(
            0 < self.target_success_rate <= 1,
            "sft.target_success_rate",
            self.target_success_rate,
            "(0, 1]",
        )
