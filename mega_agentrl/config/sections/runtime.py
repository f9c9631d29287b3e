"""Settings of how a run is executed: engines, evaluation, cluster, weight transfer and report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from mega_agentrl.config.enums import TrackerName, TransportKind
from mega_agentrl.config.errors import check_range
from mega_agentrl.config.ranges import MAX_STEPS, MAX_TIMEOUT_S, MAX_TOKENS, Range, Section


@dataclass
class EngineConfig(Section, key="engine"):
    """A vLLM engine."""

    tensor_parallel_size: Annotated[int, Range(at_least=1, at_most=1024, unit="ranks")] = 1
    """Tensor-parallel size of each engine."""
    max_model_len: Annotated[int, Range(at_least=16, at_most=MAX_TOKENS, unit="tokens")] = 4096
    """Maximum number of prompt and response tokens of a request."""
    cpu_kv_cache_gib: Annotated[int, Range(at_least=1, at_most=65_536, unit="GiB")] = 4
    """Size of the KV cache on a CPU."""
    gpu_memory_utilization: Annotated[float, Range(above=0, below=1)] = 0.6
    """Fraction of the GPU memory that vLLM may use."""
    max_num_seqs: Annotated[int, Range(at_least=1, at_most=65_536)] = 256
    """Maximum number of requests that run concurrently."""
    enforce_eager: bool = False
    """Disable CUDA graphs; CPUs never use them."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Values for fields of vLLM's `AsyncEngineArgs` that no other setting sets:
    `engine.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY`. The preflight does not know
    them."""
    stuck_timeout_s: Annotated[float, Range(above=0, at_most=MAX_TIMEOUT_S, unit="s")] = 180.0
    """Time without a token although requests run, or without an answer to a health check, after
    which an engine is lost and replaced. Until its first answer, for which kernels are compiled, it
    has five times as long."""

    def stuck_limit_s(self, *, has_answered: bool) -> float:
        """Return the silence in seconds after which an engine is lost.

        Args:
            has_answered: Whether it has answered a request since its start.
        """
        return self.stuck_timeout_s if has_answered else 5 * self.stuck_timeout_s


@dataclass
class EvaluateConfig(Section, key="evaluate"):
    """Held-out evaluation on `data.validation`, if set, before, during and after RL."""

    every_steps: Annotated[int, Range(at_least=0, at_most=MAX_STEPS, unit="steps")] = 0
    """RL steps between evaluations; 0 evaluates only before and after RL."""
    num_questions: Annotated[int, Range(at_least=0, at_most=1_000_000_000)] = 0
    """Number of validation questions, taken in order; 0 is all."""
    num_samples: Annotated[int, Range(at_least=1, at_most=65_536)] = 1
    """Samples per question at `evaluate.temperature`; more than one also give pass@k and mean@k."""
    temperature: Annotated[float, Range(at_least=0, at_most=100)] = 1.0
    """Sampling temperature of the evaluation."""
    greedy: bool = False
    """Also sample one greedy answer per question."""
    before_training: bool = True
    """Evaluate before RL, too. False starts with the first step; `reward_before` in `summary.json`
    is then null, and the final table shows the last evaluation alone. A run without RL steps is
    evaluated once in either case."""


@dataclass
class ClusterConfig(Section, key="cluster"):
    """Ray cluster and placement of the engines."""

    ray_address: str = ""
    """Address of the Ray cluster to join; empty starts one on this machine."""
    num_engines: Annotated[int, Range(at_least=1, at_most=65_536)] = 1
    """Number of vLLM engines."""
    call_timeout_s: Annotated[float, Range(above=0, at_most=MAX_TIMEOUT_S, unit="s")] = 600.0
    """Timeout of a call of a policy rank or an engine, of a request to an engine and of the start
    of an engine. Within a weight transfer a rank waits a tenth of it for another rank."""
    colocated: bool = False
    """Run the engines on the policy's GPUs; one of the two uses them at a time."""
    colocated_models: bool = False
    """Run critic and reward model on the policy's GPUs instead of their own; the model that
    computes has its state there, the others in host memory."""


@dataclass
class WeightSyncConfig(Section, key="weight_sync"):
    """Transfer of the weights from the policy to the engines."""

    bucket_mib: Annotated[int, Range(at_least=1, at_most=65_536, unit="MiB")] = 64
    """Size of a transfer bucket; a rank needs memory for two."""
    transport: TransportKind = TransportKind.auto
    """Transport between ranks; any value but auto must connect all ranks that exchange weights."""
    in_flight: bool = False
    """Send the weights while requests are running; needs `rollout.max_staleness` of at least 1. The
    engines hold the requests during the transfer and continue them with the new weights; each token
    records the version that sampled it. Otherwise a step waits for the requests or interrupts
    them."""


@dataclass
class ReportConfig(Section, key="report"):
    """Metrics, traces and saved rollouts."""

    save_trees_every_steps: Annotated[int, Range(at_least=0, at_most=MAX_STEPS, unit="steps")] = 0
    """RL steps between writes of a step's rollout trees to `rollouts/` (about 40 bytes per token);
    the trees of the last step and of evaluations are then written, too. 0 writes none."""
    trackers: list[TrackerName] = field(default_factory=lambda: [TrackerName.tensorboard])
    """Metrics backends beside `metrics.jsonl`."""
    prometheus_port: Annotated[int, Range(at_least=0, at_most=65535)] = 0
    """Port of a Prometheus endpoint on the driver with the latest metrics; 0 for none."""
    prometheus_host: str = "127.0.0.1"
    """Address that the endpoint listens on. It has no password: by default only processes of the
    driver's machine reach it; 0.0.0.0 opens it on all interfaces."""
    trace_destination: str = ""
    """Destination of the trajectories' OpenTelemetry spans: an OTLP endpoint (`http://...`) or a
    file; empty for none."""
    profile_steps: Annotated[list[int], Range(at_least=1, at_most=MAX_STEPS)] = field(
        default_factory=list
    )
    """RL steps, counted from 1, whose log-prob pass and update are profiled on the policy's rank
    0."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
        host = self.prometheus_host
        check_range(bool(host.strip()), "report.prometheus_host", host, "an address of the driver")
