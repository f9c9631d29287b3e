"""Settings of how a run is executed: engines, evaluation, cluster, weight transfer and report."""

from __future__ import annotations

from dataclasses import dataclass, field

from mega_agentrl.config.enums import TrackerName, TransportKind
from mega_agentrl.config.errors import check_minimums, check_range


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
        check_minimums(
            self,
            "engine",
            tensor_parallel_size=1,
            max_model_len=16,
            cpu_kv_cache_gib=1,
            max_num_seqs=1,
        )
        check_range(
            0 < self.gpu_memory_utilization < 1,
            "engine.gpu_memory_utilization",
            self.gpu_memory_utilization,
            "between 0 and 1",
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
        check_minimums(self, "evaluate", every_steps=0, num_questions=0, num_samples=1)


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
    transport: TransportKind = TransportKind.auto
    """Transport between ranks; any value but auto must connect all ranks that exchange weights."""

    def __post_init__(self) -> None:
        check_range(self.bucket_mib >= 1, "weight_sync.bucket_mib", self.bucket_mib, "at least 1")


@dataclass
class ReportConfig:
    """Metrics, traces and saved rollouts."""

    save_trees_every_steps: int = 0
    """RL steps between writes of a step's rollout trees to `rollouts/` (about 40 bytes per token);
    those of the last step and of the evaluations are then written, too. 0 writes none."""
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
