"""The configuration schema: type, default and meaning of every setting of a run.

Yaml files only set values; the defaults are here. The ranges of a section are checked in its
`__post_init__` (called by `OmegaConf.to_object`), conditions across sections in `config.checks`.
Imports no torch, so that a login node can validate a configuration. Units are in the names: `_s`
seconds, `_mib` mebibytes, `_gib` gibibytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from mega_agentrl.config.enums import (
    Branching,
    CallProtocol,
    InvalidCallAction,
    TemplateCheck,
    TrackerName,
)
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.branching import BranchConfig
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.config.sections.groups import GroupConfig
from mega_agentrl.config.sections.policy import (
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    SftConfig,
)
from mega_agentrl.config.sections.ranges import check_range
from mega_agentrl.config.sections.reward import RewardConfig
from mega_agentrl.config.sections.tools import ToolConfig


@dataclass
class EngineConfig:
    """A vLLM engine."""

    tensor_parallel_size: int = 1
    """Tensor-parallel size of each engine."""
    max_model_len: int = 4096
    """Maximum number of prompt and response tokens of a request."""
    cpu_kv_cache_gib: int = 4
    """Size of the KV cache on a CPU."""
    gpu_memory_utilization: float = 0.6
    """Fraction of the GPU memory that vLLM may use."""
    max_num_seqs: int = 256
    """Maximum number of requests that run concurrently."""
    enforce_eager: bool = True
    """Disable CUDA graphs; CPUs never use them."""

    def __post_init__(self) -> None:
        check_range(
            self.tensor_parallel_size >= 1,
            "engine.tensor_parallel_size",
            self.tensor_parallel_size,
            "at least 1",
        )
        check_range(self.max_model_len >= 16, "engine.max_model_len", self.max_model_len, ">= 16")
        check_range(
            self.cpu_kv_cache_gib >= 1,
            "engine.cpu_kv_cache_gib",
            self.cpu_kv_cache_gib,
            "at least 1",
        )
        check_range(
            0 < self.gpu_memory_utilization < 1,
            "engine.gpu_memory_utilization",
            self.gpu_memory_utilization,
            "between 0 and 1",
        )
        check_range(self.max_num_seqs >= 1, "engine.max_num_seqs", self.max_num_seqs, ">= 1")


@dataclass
class RolloutConfig(GroupConfig):
    """Sampling of trajectories and selection of the groups to train on (`GroupConfig`)."""

    group_size: int = 8
    """Trajectories per prompt, M in ARPO."""
    branching: Branching = Branching.after_result
    """Rule that decides where a trajectory forks."""
    branch: BranchConfig = field(default_factory=BranchConfig)
    """Parameters of the branching rule."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus sampling threshold; 1 disables it."""
    top_k: int = 0
    """Number of most probable tokens to sample from; 0 disables it."""
    max_response_tokens: int = 2048
    """Maximum number of response tokens of a trajectory, tool answers included."""
    max_turns: int = 8
    """Maximum number of assistant turns of a trajectory."""
    max_tool_calls: int = 3
    """Maximum number of tool calls of a trajectory."""
    trajectory_timeout_s: float = 0.0
    """Maximum duration of a trajectory; 0 is no limit. A fork continues its parent's clock."""
    call_protocol: CallProtocol = CallProtocol.tags
    """Syntax of tool calls."""
    on_invalid_call: InvalidCallAction = InvalidCallAction.answer
    """Response to a tool call that cannot be run."""
    template_check: TemplateCheck = TemplateCheck.strict
    """Comparison of the finished conversation with the full chat template."""
    use_inference_chat_template: bool = False
    """Render the conversation anew for every turn instead of appending to the sampled tokens, for
    chat templates that drop earlier reasoning."""
    interaction_config_file: str = ""
    """Yaml list of simulated users; empty for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(
            self.group_size >= 1,
            "rollout.group_size",
            self.group_size,
            "at least 1",
        )
        check_range(self.temperature > 0, "rollout.temperature", self.temperature, "above 0")
        check_range(
            not self.branch.entropy_estimate_top_k or self.temperature == 1,
            "rollout.branch.entropy_estimate_top_k",
            self.branch.entropy_estimate_top_k,
            f"0 unless rollout.temperature={self.temperature} is 1, at which the engine lists them",
        )
        check_range(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "in (0, 1]")
        for key in ("max_response_tokens", "max_turns"):
            check_range(getattr(self, key) >= 1, f"rollout.{key}", getattr(self, key), "at least 1")
        check_range(
            self.max_tool_calls >= 0, "rollout.max_tool_calls", self.max_tool_calls, "at least 0"
        )
        limit_s = self.trajectory_timeout_s
        check_range(
            0 <= limit_s < inf, "rollout.trajectory_timeout_s", limit_s, "seconds, 0 for no limit"
        )
        check_range(
            not (limit_s and self.partial_rollout),
            "rollout.trajectory_timeout_s",
            limit_s,
            "0 with rollout.partial_rollout, whose groups pause while the policy is updated",
        )


@dataclass
class EvaluateConfig:
    """Held-out evaluation on `data.validation` before, during and after RL."""

    every_steps: int = 0
    """RL steps between evaluations; 0 evaluates only before and after RL."""
    num_questions: int = 0
    """Number of validation questions, taken in order; 0 is all."""
    num_samples: int = 1
    """Samples per question at `evaluate.temperature`; more than one also give pass@k and mean@k."""
    temperature: float = 1.0
    """Sampling temperature of the evaluation."""
    greedy: bool = False
    """Also sample one greedy answer per question."""

    def __post_init__(self) -> None:
        check_range(self.every_steps >= 0, "evaluate.every_steps", self.every_steps, "at least 0")
        check_range(self.num_questions >= 0, "evaluate.num_questions", self.num_questions, ">= 0")
        check_range(self.num_samples >= 1, "evaluate.num_samples", self.num_samples, "at least 1")


@dataclass
class ClusterConfig:
    """Ray cluster and placement of the engines."""

    ray_address: str = ""
    """Address of the Ray cluster to join; empty starts one on this machine."""
    num_engines: int = 1
    """Number of vLLM engines."""
    call_timeout_s: float = 600.0
    """Timeout of a call of a policy rank or an engine, of a request to an engine and of the start
    of an engine. Within a weight transfer a rank waits a tenth of it for another rank."""
    colocated: bool = False
    """Run the engines on the policy's GPUs; one of the two uses them at a time."""

    def __post_init__(self) -> None:
        check_range(self.num_engines >= 1, "cluster.num_engines", self.num_engines, "at least 1")
        limit_s = self.call_timeout_s
        check_range(limit_s > 0, "cluster.call_timeout_s", limit_s, "more than 0")


@dataclass
class WeightSyncConfig:
    """Transfer of the weights from the policy to the engines."""

    bucket_mib: int = 64
    """Size of a transfer bucket; a rank needs memory for two."""

    def __post_init__(self) -> None:
        check_range(self.bucket_mib >= 1, "weight_sync.bucket_mib", self.bucket_mib, "at least 1")


@dataclass
class ReportConfig:
    """Metrics, traces and saved rollouts."""

    save_trees_every_steps: int = 0
    """RL steps between steps whose rollout trees are written to `rollouts/`, together with those of
    the last step and of the evaluations (about 40 bytes per token); 0 writes none."""
    trackers: list[TrackerName] = field(default_factory=lambda: [TrackerName.tensorboard])
    """Metrics backends beside `metrics.jsonl`."""
    prometheus_port: int = 0
    """Port of a Prometheus endpoint on the driver with the latest metrics; 0 for none."""
    trace_destination: str = ""
    """Destination of the trajectories' OpenTelemetry spans: an OTLP endpoint (`http://...`) or a
    file; empty for none."""
    profile_steps: list[int] = field(default_factory=list)
    """RL steps whose log-prob pass and update are profiled on the policy's rank 0."""

    def __post_init__(self) -> None:
        check_range(
            self.save_trees_every_steps >= 0,
            "report.save_trees_every_steps",
            self.save_trees_every_steps,
            "at least 0",
        )
        names = [str(name) for name in self.trackers]
        check_range(len(set(names)) == len(names), "report.trackers", names, "each tracker once")
        is_url_or_file = (
            self.trace_destination.startswith(("http://", "https://"))
            or "://" not in self.trace_destination
        )
        check_range(
            is_url_or_file,
            "report.trace_destination",
            self.trace_destination,
            "http://..., https://..., a file, or nothing",
        )
        port, steps = self.prometheus_port, self.profile_steps
        check_range(0 <= port < 65536, "report.prometheus_port", port, "a port, 0 for no endpoint")
        check_range(
            min(steps, default=1) >= 1, "report.profile_steps", steps, "steps, 1 is the first"
        )


@dataclass
class TrainConfig:
    """The whole run.

    Without `total_steps`, `total_epochs` and `sft.max_steps` the run is one evaluation of the
    initial weights.
    """

    run_dir: str = "runs/default"
    """Folder of the run's files."""
    seed: int = 1
    """Seed of all random streams."""
    total_steps: int = 100
    """Number of RL steps."""
    total_epochs: int = 0
    """Passes over the training data; above 0 it replaces `total_steps`."""
    save_every_steps: int = 20
    """RL steps between checkpoints; 0 saves only at the end and on a signal."""
    resume: bool = True
    """Continue an unfinished run with the same settings in `run_dir`; false moves it aside and
    starts anew."""
    deterministic: bool = False
    """Make two runs give the same numbers, bit for bit on a CPU: engines process one request at a
    time without prefix cache, everything runs on one thread. Slow; for tests."""
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
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    def __post_init__(self) -> None:
        for key in ("total_steps", "total_epochs", "save_every_steps"):
            check_range(getattr(self, key) >= 0, key, getattr(self, key), "at least 0")

    @property
    def is_eval_only(self) -> bool:
        """Whether the run only evaluates the initial weights and trains nothing."""
        return not (self.total_steps or self.total_epochs or self.sft.max_steps)
