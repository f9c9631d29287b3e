"""The one schema: every setting of a run, its type, default and meaning.

Yaml files only set values; defaults live here. Ranges of one section are checked in its
`__post_init__` (run by `OmegaConf.to_object`), conditions across sections in
`config.check`. Imports no torch, so that a login node can validate a configuration.
Units are in the names: `_s` seconds, `_mib` mebibytes, `_gib` gibibytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from mega_agentrl.config.algo_schema import AlgoConfig
from mega_agentrl.config.branch_schema import BranchConfig
from mega_agentrl.config.choices import (
    Branching,
    CallProtocol,
    OnBadCall,
    TemplateCheck,
    TrackerName,
)
from mega_agentrl.config.data_schema import DataConfig
from mega_agentrl.config.group_schema import GroupConfig
from mega_agentrl.config.policy_schema import (
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    SftConfig,
)
from mega_agentrl.config.ranges import require
from mega_agentrl.config.reward_schema import RewardConfig
from mega_agentrl.config.tool_schema import ToolConfig


@dataclass
class EngineConfig:
    """One vLLM engine.

    tensor: its tensor-parallel size. max_model_len: prompt plus response, tokens.
    kv_cache_gib: KV cache on a CPU. memory_fraction: share of GPU memory on a GPU.
    max_concurrent: requests that run at once. eager: no graph capture (always so on a CPU).
    """

    tensor: int = 1
    max_model_len: int = 4096
    kv_cache_gib: int = 4
    memory_fraction: float = 0.6
    max_concurrent: int = 256
    eager: bool = True

    def __post_init__(self) -> None:
        require(self.tensor >= 1, "engine.tensor", self.tensor, "at least 1")
        require(self.max_model_len >= 16, "engine.max_model_len", self.max_model_len, ">= 16")
        require(self.kv_cache_gib >= 1, "engine.kv_cache_gib", self.kv_cache_gib, "at least 1")
        require(
            0 < self.memory_fraction < 1,
            "engine.memory_fraction",
            self.memory_fraction,
            "between 0 and 1",
        )
        require(self.max_concurrent >= 1, "engine.max_concurrent", self.max_concurrent, ">= 1")


@dataclass
class RolloutConfig(GroupConfig):
    """How trajectories are sampled, and which groups of them are trained on (`GroupConfig`).

    num_trajectories: M per prompt. max_response_tokens: per trajectory, tool answers
    included. max_turns, max_calls, max_wall_s (0: no limit): per trajectory; a fork has its
    parent's clock.
    call_protocol: how tools are called. on_bad_call: what a wrong call leads to.
    template_check: of the finished conversation against the full chat template.
    use_inference_chat_template: render the conversation anew for every turn instead of adding
    to what was sampled, for templates that drop old reasoning.
    interaction_file: yaml list of simulated users, see `rollout.interaction`; empty for none.
    """

    num_trajectories: int = 8
    branching: Branching = Branching.after_result
    branch: BranchConfig = field(default_factory=BranchConfig)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_response_tokens: int = 2048
    max_turns: int = 8
    max_calls: int = 3
    max_wall_s: float = 0.0
    call_protocol: CallProtocol = CallProtocol.tags
    on_bad_call: OnBadCall = OnBadCall.answer
    template_check: TemplateCheck = TemplateCheck.strict
    use_inference_chat_template: bool = False
    interaction_file: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_trajectories >= 1,
            "rollout.num_trajectories",
            self.num_trajectories,
            "at least 1",
        )
        require(self.temperature > 0, "rollout.temperature", self.temperature, "above 0")
        require(
            not self.branch.estimate_top_k or self.temperature == 1,
            "rollout.branch.estimate_top_k",
            self.branch.estimate_top_k,
            f"0 unless rollout.temperature={self.temperature} is 1, which the engine lists by",
        )
        require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "in (0, 1]")
        for key in ("max_response_tokens", "max_turns"):
            require(getattr(self, key) >= 1, f"rollout.{key}", getattr(self, key), "at least 1")
        require(self.max_calls >= 0, "rollout.max_calls", self.max_calls, "at least 0")
        limit_s = self.max_wall_s
        require(0 <= limit_s < inf, "rollout.max_wall_s", limit_s, "seconds, 0 for no limit")
        require(
            not (limit_s and self.carry_over),
            "rollout.max_wall_s",
            limit_s,
            "0 with rollout.carry_over, whose groups rest while the policy is updated",
        )


@dataclass
class EvaluateConfig:
    """Held-out evaluation before and after RL, and within it.

    every: RL steps between two evaluations; 0 for those before and after alone. num_questions:
    taken from validation in order, 0 for all. num_samples: per question at `temperature`; above
    1 they also give pass@k and mean@k. greedy: one greedy answer per question beside it.
    """

    every: int = 0
    num_questions: int = 0
    num_samples: int = 1
    temperature: float = 1.0
    greedy: bool = False

    def __post_init__(self) -> None:
        require(self.every >= 0, "evaluate.every", self.every, "at least 0")
        require(self.num_questions >= 0, "evaluate.num_questions", self.num_questions, ">= 0")
        require(self.num_samples >= 1, "evaluate.num_samples", self.num_samples, "at least 1")


@dataclass
class ClusterConfig:
    """Where the run happens. address: Ray cluster to join; empty starts one here.

    call_deadline_s: limit of one call of a policy rank or an engine, of one request to an engine
    and of an engine's start. Within a weight transfer a rank waits a tenth of it for another.
    num_engines: vLLM engines beside the policy.
    colocated: the engines are on the policy's GPUs, and one of the two has them at a time.
    """

    address: str = ""
    num_engines: int = 1
    call_deadline_s: float = 600.0
    colocated: bool = False

    def __post_init__(self) -> None:
        require(self.num_engines >= 1, "cluster.num_engines", self.num_engines, "at least 1")
        limit_s = self.call_deadline_s
        require(limit_s > 0, "cluster.call_deadline_s", limit_s, "more than 0")


@dataclass
class WeightsConfig:
    """The way of the weights into the engines.

    bucket_mib: what travels in one go; a rank needs memory for two.
    """

    bucket_mib: int = 64

    def __post_init__(self) -> None:
        require(self.bucket_mib >= 1, "weights.bucket_mib", self.bucket_mib, "at least 1")


@dataclass
class ReportConfig:
    """What is shown and kept.

    trees_every: every that many RL steps all rollout trees are written to `rollouts/`, and those
    of the last step and of the held-out evaluations with them (about 40 bytes a token); 0 for
    none.
    trackers: where the metrics go beside `metrics.jsonl`, see `TrackerName`.
    prometheus_port: of an endpoint on the driver with the newest metrics; 0 for none.
    spans: where the OpenTelemetry spans of the trajectories go, an OTLP endpoint (`http://...`)
    or a file; empty for none.
    profile_steps: RL steps whose log-prob pass and update are traced on the policy's rank 0.
    """

    trees_every: int = 0
    trackers: list[TrackerName] = field(default_factory=lambda: [TrackerName.tensorboard])
    prometheus_port: int = 0
    spans: str = ""
    profile_steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        require(self.trees_every >= 0, "report.trees_every", self.trees_every, "at least 0")
        named = [str(name) for name in self.trackers]
        require(len(set(named)) == len(named), "report.trackers", named, "each tracker once")
        near = self.spans.startswith(("http://", "https://")) or "://" not in self.spans
        require(near, "report.spans", self.spans, "http://..., https://..., a file, or nothing")
        port, steps = self.prometheus_port, self.profile_steps
        require(0 <= port < 65536, "report.prometheus_port", port, "a port, 0 for no endpoint")
        require(min(steps, default=1) >= 1, "report.profile_steps", steps, "steps, 1 is the first")


@dataclass
class TrainConfig:
    """The whole run.

    run_dir: folder of the run's files. seed: of every random stream. total_steps: RL steps;
    epochs: above 0, passes over the training data instead of these. Without any of them, and
    without sft.max_steps, the run is one evaluation of the start weights.
    save_every: RL steps between checkpoints; 0: only at the end and at a signal. resume: go on
    with an unfinished run of the same settings in run_dir; false keeps it aside and begins anew.
    deterministic: two runs give the same numbers, bit for bit on a CPU: an engine computes one
    request at a time, without prefix cache, everything on one thread. Slow; for checks.
    """

    run_dir: str = "runs/default"
    seed: int = 1
    total_steps: int = 100
    epochs: int = 0
    save_every: int = 20
    resume: bool = True
    deterministic: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tool: ToolConfig = field(default_factory=ToolConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    def __post_init__(self) -> None:
        for key in ("total_steps", "epochs", "save_every"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "at least 0")

    @property
    def validates_only(self) -> bool:
        """Whether nothing is trained: the start weights are evaluated once, and that is all."""
        return not (self.total_steps or self.epochs or self.sft.max_steps)
