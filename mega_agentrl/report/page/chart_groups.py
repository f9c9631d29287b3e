"""Select the charts of a run: known metrics in groups, then all other logged metrics.

A chart appears only if the log has one of its metrics. A metric that is part of no chart gets its
own under "All other metrics", so that every measured value is shown.

To add a chart: add a `_ChartSpec` to the group that it belongs to. Nothing else is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.report.metrics_file import running_mean
from mega_agentrl.report.page.svg_charts import Chart, LineStyle, Series
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.report.metrics_file import MetricLog, MetricSeries

RL_STAGE, SFT_STAGE = "rl", "sft"
RUNNING_MEAN_STEPS = 5
"""Window of the running mean in the charts of reward and success."""
MAX_OTHER_CHARTS = 120
MAX_TOOLS = 64
"""Tools with charts and a row of their own; the metrics of further tools are other metrics."""
MAX_SERIES = 64
"""Lines of a chart, in eight colours; further ones are counted in its note."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ChartGroup:
    """Charts under a common heading."""

    title: str
    charts: Sequence[Chart]
    is_collapsed: bool = False
    """Whether the group is collapsed at first."""
    num_omitted: int = 0
    """Number of charts beyond the limit."""
    has_small_charts: bool = False
    """Whether the charts are drawn small, because they are read beside each other."""


@dataclass(slots=True, kw_only=True, frozen=True)
class _ChartSpec:
    """A chart of the stage `rl`."""

    title: str
    metric_patterns: tuple[str, ...]
    """Metrics of the chart; `*` matches any text."""
    unit: str = ""
    note: str = ""
    """A sentence about the chart."""
    is_stacked: bool = False
    """Draw stacked areas."""
    is_log_scale: bool = False
    """Use a logarithmic axis."""


_LEARNING_SPECS = (
    _ChartSpec(
        title="Policy entropy",
        metric_patterns=("rollout/entropy", "rollout/entropy_root", "rollout/entropy_after_tool"),
        unit="nats",
        note="root: first tokens of a response; after_tool: first tokens after a tool's answer",
    ),
    _ChartSpec(
        title="Response length",
        metric_patterns=(
            "rollout/response_tokens_mean",
            "rollout/sampled_tokens_mean",
            "rollout/response_tokens_min",
            "rollout/response_tokens_max",
        ),
        unit="tokens",
        note="response: including tool answers; sampled: only the policy's tokens",
    ),
    _ChartSpec(
        title="Prompt length",
        metric_patterns=("rollout/prompt_tokens_mean", "rollout/prompt_tokens_max"),
        unit="tokens",
    ),
    _ChartSpec(
        title="Range of the reward",
        metric_patterns=("rollout/reward_min", "rollout/reward_max"),
        note="lowest and highest reward of a trajectory that is trained on",
    ),
    _ChartSpec(
        title="Failed trajectories",
        metric_patterns=("rollout/failed_fraction", "reward/failed_fraction"),
        unit="share",
        note="of all trajectories; reward: those whose reward could not be computed",
    ),
    _ChartSpec(title="Passes over the data", metric_patterns=("data/epoch",), unit="epochs"),
    _ChartSpec(
        title="Turns and calls",
        metric_patterns=(
            "rollout/num_turns_mean",
            "rollout/tool_calls_mean",
            "rollout/invalid_calls_mean",
        ),
        unit="per trajectory",
    ),
    _ChartSpec(
        title="Requests of the agent",
        metric_patterns=("rollout/agent/requests_mean", "rollout/agent/branches_mean"),
        unit="per attempt",
        note="branches: histories that were rewritten, and contexts of sub-agents",
    ),
    _ChartSpec(
        title="Fields of requests without effect",
        metric_patterns=("rollout/agent/ignored/*",),
        unit="share of requests",
    ),
    _ChartSpec(
        title="How trajectories end",
        metric_patterns=("rollout/stop/*",),
        unit="share",
        is_stacked=True,
    ),
)
_BRANCHING_SPECS = (
    _ChartSpec(
        title="Branches",
        metric_patterns=(
            "rollout/forks_per_prompt",
            "rollout/extra_roots_per_prompt",
            "rollout/decisions_per_prompt",
        ),
        unit="per tree",
    ),
    _ChartSpec(
        title="What branching saves",
        metric_patterns=(
            "rollout/tokens_saved_fraction",
            "rollout/calls_saved_fraction",
            "rollout/fork_rate",
        ),
        unit="share",
    ),
    _ChartSpec(
        title="Entropy rise at decisions", metric_patterns=("rollout/delta_h",), unit="nats"
    ),
)
_UPDATE_SPECS = (
    _ChartSpec(
        title="Engine against trainer: probabilities",
        metric_patterns=("mismatch/prob_*",),
        note="absolute difference of the sampled tokens' probabilities, over trained tokens",
        is_log_scale=True,
    ),
    _ChartSpec(
        title="Engine against trainer",
        metric_patterns=("mismatch/*",),
        unit="nats",
        note="absolute difference of log-prob and entropy, over trained tokens",
        is_log_scale=True,
    ),
    _ChartSpec(title="KL", metric_patterns=("actor/approx_kl", "actor/ref_kl", "actor/kl*")),
    _ChartSpec(title="Clipped tokens", metric_patterns=("actor/clipfrac*",), unit="share"),
    _ChartSpec(title="Loss", metric_patterns=("actor/loss", "actor/policy_loss", "critic/loss")),
    _ChartSpec(title="Gradient norm", metric_patterns=("actor/grad_norm", "critic/grad_norm")),
    _ChartSpec(
        title="Values", metric_patterns=("critic/value_mean", "critic/return_mean"), unit="reward"
    ),
    _ChartSpec(
        title="Critic",
        metric_patterns=("critic/explained_variance", "critic/clipfrac"),
        unit="share",
    ),
    _ChartSpec(title="Learning rate", metric_patterns=("actor/lr",)),
    _ChartSpec(title="Groups", metric_patterns=("rollout/num_groups_*",), unit="prompts"),
)
_SPEED_SPECS = (
    _ChartSpec(
        title="Time of a step by phase", metric_patterns=("time/*",), unit="s", is_stacked=True
    ),
    _ChartSpec(
        title="Throughput",
        metric_patterns=("perf/tokens_per_s", "perf/unique_tokens_per_s"),
        unit="tokens/s",
        note="response tokens; unique: those that trajectories share counted once",
    ),
    _ChartSpec(
        title="Token ratio of the trees",
        metric_patterns=("tree/token_ratio",),
        note="tokens of all trajectories, prompts included, over those of their trees",
    ),
    _ChartSpec(
        title="Balance of the data ranks",
        metric_patterns=("actor/load_imbalance",),
        note="cost of the costliest rank in the update over the mean",
    ),
    _ChartSpec(title="MFU", metric_patterns=("perf/mfu*",), unit="share"),
    _ChartSpec(
        title="GPU use", metric_patterns=("gpu/util/*",), unit="share", note="over all GPUs"
    ),
    _ChartSpec(title="GPU memory", metric_patterns=("gpu/memory_gib/*",), unit="GiB"),
    _ChartSpec(title="GPU power", metric_patterns=("gpu/power_w/*",), unit="W"),
    _ChartSpec(title="GPU temperature", metric_patterns=("gpu/temperature_c/*",), unit="°C"),
    _ChartSpec(title="GPU errors", metric_patterns=("gpu/nvlink_errors/sum", "gpu/ecc_errors/sum")),
    _ChartSpec(
        title="Weight transfer",
        metric_patterns=("weight_sync/total_s", "weight_sync/*_s"),
        unit="s",
    ),
)
_DRIVER_SPECS = (
    _ChartSpec(
        title="Pauses of the event loops",
        metric_patterns=("driver/loop_pause_max_s", "driver/agent_loop_pause_max_s"),
        unit="s",
        note="longest of the step; meanwhile no engine, tool or agent is served",
    ),
    _ChartSpec(
        title="Memory of the driver",
        metric_patterns=("driver/rss_mib", "driver/rss_growth_mib"),
        unit="MiB",
    ),
    _ChartSpec(
        title="Shares of limits",
        metric_patterns=("driver/memory_fraction", "driver/open_files_fraction"),
        unit="share",
        note="memory: of the machine or control group, by all processes; "
        "open files: of the driver's descriptors",
    ),
    _ChartSpec(
        title="Descriptors, threads and connections",
        metric_patterns=(
            "driver/open_files_max",
            "driver/num_threads_max",
            "gateway/num_connections",
        ),
    ),
    _ChartSpec(
        title="Held by the gateway",
        metric_patterns=(
            "gateway/held_mib",
            "gateway/session_held_mib",
            "gateway/in_flight_mib",
        ),
        unit="MiB",
        note="session: of the largest session",
    ),
    _ChartSpec(
        title="Processes killed for memory",
        metric_patterns=("driver/oom_kills",),
        note="by the kernels of the run's machines, in sandboxes, too",
    ),
)
_REWARD_PARTS_TITLE, _REWARD_PART_PREFIX = "Parts of the reward", "reward/"
_ARES_BUCKET_METRICS = ("share", "accuracy", "hwe", "target", "alpha", "beta", "lambda", "kl")


def chart_groups(log: MetricLog) -> list[ChartGroup]:
    """Return all groups that have a chart."""
    used = set(_REWARD_NAMES)
    groups = [
        ("Learning", [*_outcome_charts(log), *_charts_from_specs(log, _LEARNING_SPECS, used)]),
        (_REWARD_PARTS_TITLE, _charts_from_specs(log, _reward_part_specs(log), used)),
        ("Branching", _charts_from_specs(log, _BRANCHING_SPECS, used)),
        ("Tools", _charts_from_specs(log, _tool_specs(log), used)),
        ("Update", _charts_from_specs(log, _UPDATE_SPECS, used)),
        ("Difficulty controllers", _charts_from_specs(log, _ares_specs(log), used)),
        ("Speed", _charts_from_specs(log, _SPEED_SPECS, used)),
        ("Driver", _charts_from_specs(log, _DRIVER_SPECS, used)),
        ("Warm start", _sft_charts(log)),
    ]
    known_groups = [
        ChartGroup(title=title, charts=charts, has_small_charts=title == _REWARD_PARTS_TITLE)
        for title, charts in groups
        if charts
    ]
    stage_groups = [
        group for stage in _other_stages(log) if (group := _remaining_charts(log, stage, set()))
    ]
    other_group = _remaining_charts(log, RL_STAGE, used)
    return [*known_groups, *stage_groups, *([other_group] if other_group else [])]


def _other_stages(log: MetricLog) -> list[str]:
    """Return stages that are neither training nor evaluations, in order of writing."""
    known = {RL_STAGE, SFT_STAGE, *(line.stage for line in log.validation_lines())}
    return [
        stage for stage in dict.fromkeys(line.stage for line in log.lines) if stage not in known
    ]


def _remaining_charts(log: MetricLog, stage: str, used: set[str]) -> ChartGroup | None:
    """Return a chart for each metric of a stage that is part of no other chart."""
    names = [name for name in sorted(log.metric_names(stage)) if name not in used]
    if not names:
        return None
    charts = [
        Chart(
            title=name,
            series=[Series(name="", points=log.series(stage, name))],
            includes_zero=False,
        )
        for name in names[:MAX_OTHER_CHARTS]
    ]
    return ChartGroup(
        title="All other metrics" if stage == RL_STAGE else f"Stage {stage}",
        charts=charts,
        is_collapsed=True,
        num_omitted=len(names) - len(charts),
    )


_REWARD_NAMES = (
    "rollout/reward_unfiltered",
    "rollout/reward_mean",
    "rollout/success_unfiltered",
    "rollout/success",
)


def _outcome_charts(log: MetricLog) -> list[Chart]:
    """Return charts of reward and success with steps, running mean and evaluations."""
    charts = []
    for title, names, measure in (
        ("Reward", _REWARD_NAMES[:2], "reward"),
        ("Success", _REWARD_NAMES[2:], "success"),
    ):
        points = next((curve for name in names if (curve := log.series(RL_STAGE, name))), [])
        means = running_mean([value for _, value in points], RUNNING_MEAN_STEPS)
        smooth = [(step, mean) for (step, _), mean in zip(points, means, strict=True)]
        series = [
            Series(name="each step", points=points, line_style=LineStyle.faint, colour=0),
            Series(name=f"mean of {RUNNING_MEAN_STEPS}", points=smooth, colour=0),
            *_validation_series(log, measure),
        ]
        non_empty = [line for line in series if line.points]
        if non_empty:
            note = "sampled in training, before groups are filtered"
            charts.append(Chart(title=title, series=non_empty, note=note))
    return charts


def _validation_series(log: MetricLog, measure: str) -> Iterator[Series]:
    for colour, kind in ((1, "sampled"), (2, "greedy")):
        name = f"{kind}/{measure}"
        points: MetricSeries = [
            (line.step, line.values[name]) for line in log.validation_lines() if name in line.values
        ]
        title = "held out" if kind == "sampled" else "held out, greedy"
        yield Series(name=title, points=sorted(points), line_style=LineStyle.dots, colour=colour)


def _charts_from_specs(log: MetricLog, specs: Sequence[_ChartSpec], used: set[str]) -> list[Chart]:
    """Return the charts that have a metric in the log; adds their metrics to `used`."""
    charts = []
    for spec in specs:
        matches = _pattern(spec.metric_patterns).fullmatch
        names = [name for name in log.metric_names(RL_STAGE) if matches(name) and name not in used]
        used.update(names)
        num_omitted = max(0, len(names) - MAX_SERIES)
        names = names[:MAX_SERIES]
        labels = [_series_label(name, spec.metric_patterns) for name in names]
        counts = Counter(labels)
        series = [
            Series(name=label if counts[label] == 1 else name, points=log.series(RL_STAGE, name))
            for name, label in zip(names, labels, strict=True)
        ]
        if spec.is_stacked:
            series = [line for line in series if any(value for _, value in line.points)]
        if series:
            charts.append(
                Chart(
                    title=spec.title,
                    series=series,
                    unit=spec.unit,
                    note=f"{num_omitted} more are not drawn" if num_omitted else spec.note,
                    is_stacked=spec.is_stacked,
                    is_log_scale=spec.is_log_scale,
                )
            )
    return charts


def _pattern(patterns: Sequence[str]) -> re.Pattern[str]:
    """Match any of these patterns of metric names."""
    texts = (re.escape(pattern).replace(r"\*", ".*") for pattern in patterns)
    return re.compile("|".join(texts), re.DOTALL)


def _series_label(name: str, patterns: Sequence[str]) -> str:
    """Return the part of a metric's name that distinguishes it within its chart."""
    for pattern in patterns:
        head, star, tail = pattern.partition("*")
        if star and head.endswith(("/", "_")) and _pattern((pattern,)).fullmatch(name):
            rest = name.removeprefix(head).removesuffix(tail)
            return rest.removesuffix("_s") if head == "time/" else rest
    return name.rsplit("/", 1)[-1].removeprefix("num_")


def _reward_part_specs(log: MetricLog) -> list[_ChartSpec]:
    """Return a chart for each part of the reward: a common axis would flatten the small ones."""
    names = [name for name in log.metric_names(RL_STAGE) if name.startswith(_REWARD_PART_PREFIX)]
    return [
        _ChartSpec(title=name.removeprefix(_REWARD_PART_PREFIX), metric_patterns=(name,))
        for name in sorted(names)[:MAX_OTHER_CHARTS]
    ]


def _tool_specs(log: MetricLog) -> list[_ChartSpec]:
    tools = tool_names(log, RL_STAGE)
    specs = [
        _ChartSpec(
            title="Tool use",
            metric_patterns=("rollout/tool_use_fraction", "rollout/tool_success_rate"),
            unit="share",
        ),
        _ChartSpec(
            title="Calls by tool", metric_patterns=("rollout/calls/*",), unit="per trajectory"
        ),
    ]
    for tool in tools:
        head = f"rollout/tool/{tool}/"
        specs.append(
            _ChartSpec(
                title=f"Seconds of a call: {tool}",
                metric_patterns=(f"{head}latency_*_s",),
                unit="s",
            )
        )
        outcomes = tuple(f"{head}num_{status.value}" for status in ToolStatus)
        specs.append(
            _ChartSpec(
                title=f"Outcomes: {tool}", metric_patterns=outcomes, unit="calls", is_stacked=True
            )
        )
    return specs


def tool_names(log: MetricLog, stage: str, prefix: str = "rollout/tool/") -> list[str]:
    """Return the names of tools with metrics, in alphabetical order; the first `MAX_TOOLS`."""
    heads = {
        name.removeprefix(prefix).split("/", 1)[0]
        for name in log.metric_names(stage)
        if name.startswith(prefix)
    }
    return sorted(heads)[:MAX_TOOLS]


def _ares_specs(log: MetricLog) -> list[_ChartSpec]:
    buckets = [
        _ChartSpec(title=f"Per bucket: {name}", metric_patterns=(f"ares/*/{name}",))
        for name in _ARES_BUCKET_METRICS
    ]
    return [
        *buckets,
        _ChartSpec(title="Entropy threshold", metric_patterns=("ares/threshold",), unit="nats"),
    ]


def _sft_charts(log: MetricLog) -> list[Chart]:
    charts = []
    for title, name, unit in (
        ("Supervised loss", "loss", "nats per token"),
        ("Success on development questions", "dev/success", "share"),
        ("Gradient norm, warm start", "grad_norm", ""),
    ):
        points = log.series(SFT_STAGE, name)
        if points:
            series = [Series(name=name, points=points)]
            charts.append(Chart(title=title, series=series, unit=unit))
    return charts
