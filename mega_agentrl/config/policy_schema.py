"""The policy's settings: its model, how it is cut, its optimizer and warm start."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.choices import Dtype, LrSchedule
from mega_agentrl.config.ranges import require


@dataclass
class ModelConfig:
    """path: Hugging Face checkpoint folder the run starts from. dtype: see `Dtype`.

    reference: folder of a model of the same shape and vocabulary that the KL term compares with;
    empty: the weights as they are when RL begins.
    bfloat16 weights are stepped through float32 masters; gradients are float32 always.
    """

    path: str = ""
    reference: str = ""
    dtype: Dtype = Dtype.auto


@dataclass
class ParallelConfig:
    """How the policy is cut: ranks = tensor * context * data * pipeline.

    virtual: runs of layers per pipeline rank (1: plain 1F1B). context: ranks that share the
    tokens of a row. expert: ranks that share the experts, a cut of tensor * context * data
    and no further factor; expert_tensor: ranks that share one expert (null: `tensor` where
    expert is 1, else 1). sequence: tensor ranks also share the tokens between the linears.
    distributed_optimizer: data ranks share masters and moments instead of copying them.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool = False
    distributed_optimizer: bool = True

    def __post_init__(self) -> None:
        for key in ("tensor", "pipeline", "virtual", "data", "context", "expert"):
            require(getattr(self, key) >= 1, f"parallel.{key}", getattr(self, key), "at least 1")
        if self.expert_tensor is not None:
            require(
                self.expert_tensor >= 1,
                "parallel.expert_tensor",
                self.expert_tensor,
                "at least 1, or null",
            )

    @property
    def num_ranks(self) -> int:
        """Processes of the policy."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def expert_tensor_size(self) -> int:
        """`expert_tensor`, with its default resolved."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return self.tensor if self.expert == 1 else 1


@dataclass
class OptimConfig:
    """Adam, betas the decay rates of its moments.

    schedule: from lr down to min_lr at the end of the run, after a linear rise over warmup_steps
    optimizer steps. micro_batch_tokens: token budget of one forward pass on one rank.
    num_minibatches: optimizer steps per batch of rollouts.

    critic_lr: of the critic of algo.advantage=gae, constant; all else is as for the policy.
    critic_warmup_steps: RL steps at the beginning in which the critic alone is updated.
    """

    lr: float = 1e-6
    schedule: LrSchedule = LrSchedule.constant
    warmup_steps: int = 0
    min_lr: float = 0.0
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    grad_clip: float = 1.0
    micro_batch_tokens: int = 16384
    num_minibatches: int = 1
    critic_lr: float = 1e-5
    critic_warmup_steps: int = 0

    def __post_init__(self) -> None:
        require(self.lr >= 0, "optim.lr", self.lr, "at least 0")
        require(
            0 <= self.min_lr <= self.lr, "optim.min_lr", self.min_lr, f"0 to optim.lr={self.lr}"
        )
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "at least 0")
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "optim.betas",
            self.betas,
            "two numbers in [0, 1)",
        )
        require(self.critic_lr >= 0, "optim.critic_lr", self.critic_lr, "at least 0")
        num_warm = self.critic_warmup_steps
        require(num_warm >= 0, "optim.critic_warmup_steps", num_warm, "at least 0")
        require(self.grad_clip > 0, "optim.grad_clip", self.grad_clip, "above 0")
        for key in ("micro_batch_tokens", "num_minibatches"):
            require(getattr(self, key) >= 1, f"optim.{key}", getattr(self, key), "at least 1")


@dataclass
class SftConfig:
    """Supervised warm start before RL; max_steps 0 skips it.

    data: parquet or JSONL of chat messages (column `messages`). dev: one in the RL format whose
    sampled success stops it: when success on the first evaluate.num_questions of them is at
    least target_success twice in a row and no data source is still near zero.
    """

    max_steps: int = 0
    data: str = ""
    dev: str = ""
    batch_size: int = 32
    lr: float = 1e-3
    target_success: float = 0.3

    def __post_init__(self) -> None:
        require(self.max_steps >= 0, "sft.max_steps", self.max_steps, "at least 0")
        require(self.batch_size >= 1, "sft.batch_size", self.batch_size, "at least 1")
        require(0 < self.target_success <= 1, "sft.target_success", self.target_success, "(0, 1]")
