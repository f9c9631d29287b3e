"""Which charts a run gets: the known metrics in groups, then everything else that was logged.

A chart appears only where the log has one of its metrics. A metric that no chart names is drawn
by itself under "All other metrics", so that nothing that was measured is hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_agentrl.report.charts import Chart, Look, Series
from mega_agentrl.report.smooth import running_mean
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.report.metric_log import MetricLog, Points

RL, SFT = "rl", "sft"
WINDOW = 5
"""Steps of the running mean in the charts of reward and success."""
MOST_OTHERS = 120


@dataclass(slots=True, kw_only=True, frozen=True)
class ChartGroup:
    """Charts under one heading. folded: shown when asked for. num_left_out: too many to draw."""

    title: str
    charts: Sequence[Chart]
    folded: bool = False
    num_left_out: int = 0


@dataclass(slots=True, kw_only=True, frozen=True)
class _Recipe:
    """A chart of the stage "rl". names: metrics; one that ends in `*` is all that begin so."""

    title: str
    names: tuple[str, ...]
    unit: str = ""
    note: str = ""
    stacked: bool = False
    log: bool = False


_LEARNING = (
    _Recipe(
        title="Policy entropy",
        names=("rollout/entropy", "rollout/entropy_root", "rollout/entropy_after_tool"),
        unit="nats",
        note="root: first tokens of an answer; after_tool: first tokens behind a tool's answer",
    ),
    _Recipe(
        title="Response length",
        names=("rollout/response_tokens", "rollout/sampled_tokens"),
        unit="tokens",
        note="response: with what tools answered; sampled: what the policy wrote",
    ),
    _Recipe(
        title="Turns and calls",
        names=("rollout/turns", "rollout/calls_mean", "rollout/bad_calls"),
        unit="per trajectory",
    ),
    _Recipe(title="How trajectories end", names=("rollout/stop/*",), unit="share", stacked=True),
    _Recipe(title="Parts of the reward", names=("reward/*",)),
)
_BRANCHING = (
    _Recipe(
        title="Branches",
        names=("rollout/forks", "rollout/top_ups", "rollout/decisions"),
        unit="per tree",
    ),
    _Recipe(
        title="What branching saves",
        names=(
            "rollout/tokens_saved_share",
            "rollout/calls_saved_share",
            "rollout/decisions_forked",
        ),
        unit="share",
    ),
    _Recipe(title="Entropy rise at decisions", names=("rollout/delta_h",), unit="nats"),
)
_UPDATE = (
    _Recipe(
        title="Engine against trainer: probabilities",
        names=("mismatch/prob_*",),
        note="absolute difference of the sampled tokens' probabilities, over trained tokens",
        log=True,
    ),
    _Recipe(
        title="Engine against trainer",
        names=("mismatch/*",),
        unit="nats",
        note="absolute difference of log-prob and entropy, over trained tokens",
        log=True,
    ),
    _Recipe(title="KL", names=("update/approx_kl", "update/ref_kl", "update/kl*")),
    _Recipe(title="Clipped tokens", names=("update/clipfrac*",), unit="share"),
    _Recipe(title="Loss", names=("update/loss", "update/policy_loss", "value/loss")),
    _Recipe(title="Gradient norm", names=("update/grad_norm", "value/grad_norm")),
    _Recipe(title="Values", names=("value/mean", "value/return"), unit="reward"),
    _Recipe(title="Critic", names=("value/explained_variance", "value/clipped"), unit="share"),
    _Recipe(title="Learning rate", names=("update/learning_rate",)),
    _Recipe(title="Groups", names=("rollout/groups_*",), unit="prompts"),
)
_SPEED = (
    _Recipe(title="Time of a step by phase", names=("time/*",), unit="s", stacked=True),
    _Recipe(title="Throughput", names=("perf/tokens_per_s",), unit="tokens/s"),
    _Recipe(title="MFU", names=("perf/mfu*",), unit="share"),
    _Recipe(title="GPU use", names=("gpu/util/*",), unit="share", note="over all GPUs"),
    _Recipe(title="GPU memory", names=("gpu/memory_gib/*",), unit="GiB"),
    _Recipe(title="GPU power", names=("gpu/power_w/*",), unit="W"),
    _Recipe(title="GPU temperature", names=("gpu/temperature_c/*",), unit="°C"),
    _Recipe(title="GPU errors", names=("gpu/nvlink_errors/sum", "gpu/ecc_errors/sum")),
    _Recipe(title="Weight transfer", names=("send/seconds", "send/*_s"), unit="s"),
)
_ARES_BY_BUCKET = ("share", "accuracy", "hwe", "target", "alpha", "beta", "lambda", "kl")


def chart_groups(log: MetricLog) -> list[ChartGroup]:
    """All groups that have a chart."""
    used = set(_REWARD_NAMES)
    groups = [
        ("Learning", [*_outcome_charts(log), *_from(log, _LEARNING, used)]),
        ("Branching", _from(log, _BRANCHING, used)),
        ("Tools", _from(log, _tool_recipes(log), used)),
        ("Update", _from(log, _UPDATE, used)),
        ("Difficulty controllers", _from(log, _ares_recipes(log), used)),
        ("Speed", _from(log, _SPEED, used)),
        ("Warm start", _sft_charts(log)),
    ]
    found = [ChartGroup(title=title, charts=charts) for title, charts in groups if charts]
    rest = [group for stage in _other_stages(log) if (group := _each(log, stage, set()))]
    others = _each(log, RL, used)
    return [*found, *rest, *([others] if others else [])]


def _other_stages(log: MetricLog) -> list[str]:
    """Stages that are neither training nor evaluations, in order of writing."""
    known = {RL, SFT, *(line.stage for line in log.held_out())}
    return [
        stage for stage in dict.fromkeys(line.stage for line in log.lines) if stage not in known
    ]


def _each(log: MetricLog, stage: str, used: set[str]) -> ChartGroup | None:
    """A chart for each metric of a stage that no other chart has shown."""
    names = [name for name in sorted(log.names(stage)) if name not in used]
    if not names:
        return None
    charts = [
        Chart(title=name, series=[Series(name="", points=log.series(stage, name))], zero=False)
        for name in names[:MOST_OTHERS]
    ]
    return ChartGroup(
        title="All other metrics" if stage == RL else f"Stage {stage}",
        charts=charts,
        folded=True,
        num_left_out=len(names) - len(charts),
    )


_REWARD_NAMES = (
    "rollout/reward_seen",
    "rollout/reward_mean",
    "rollout/success_seen",
    "rollout/success",
)


def _outcome_charts(log: MetricLog) -> list[Chart]:
    """Reward and success: each step, a running mean, and the evaluations."""
    charts = []
    for title, names, measure in (
        ("Reward", _REWARD_NAMES[:2], "reward"),
        ("Success", _REWARD_NAMES[2:], "success"),
    ):
        points = next((found for name in names if (found := log.series(RL, name))), [])
        means = running_mean([value for _, value in points], WINDOW)
        smooth = [(step, mean) for (step, _), mean in zip(points, means, strict=True)]
        series = [
            Series(name="each step", points=points, look=Look.faint, colour=0),
            Series(name=f"mean of {WINDOW}", points=smooth, colour=0),
            *_held_out(log, measure),
        ]
        shown = [one for one in series if one.points]
        if shown:
            note = "sampled in training, before any filter of groups"
            charts.append(Chart(title=title, series=shown, note=note))
    return charts


def _held_out(log: MetricLog, measure: str) -> Iterator[Series]:
    for colour, kind in ((1, "sampled"), (2, "greedy")):
        name = f"{kind}/{measure}"
        points: Points = [
            (one.step, one.values[name]) for one in log.held_out() if name in one.values
        ]
        title = "held out" if kind == "sampled" else "held out, greedy"
        yield Series(name=title, points=sorted(points), look=Look.dots, colour=colour)


def _from(log: MetricLog, recipes: Sequence[_Recipe], used: set[str]) -> list[Chart]:
    """The charts of the recipes that have a metric in the log; notes what was used."""
    charts = []
    for recipe in recipes:
        names = [
            name for name in log.names(RL) if _matches(name, recipe.names) and name not in used
        ]
        used.update(names)
        series = [
            Series(name=_short(name, recipe.names), points=log.series(RL, name)) for name in names
        ]
        if recipe.stacked:
            series = [one for one in series if any(value for _, value in one.points)]
        if series:
            charts.append(
                Chart(
                    title=recipe.title,
                    series=series,
                    unit=recipe.unit,
                    note=recipe.note,
                    stacked=recipe.stacked,
                    log=recipe.log,
                )
            )
    return charts


def _matches(name: str, patterns: Sequence[str]) -> bool:
    for pattern in patterns:
        head, star, tail = pattern.partition("*")
        if name == pattern or (star and name.startswith(head) and name.endswith(tail)):
            return True
    return False


def _short(name: str, patterns: Sequence[str]) -> str:
    """What tells a metric from the others of its chart."""
    for pattern in patterns:
        head, star, tail = pattern.partition("*")
        if star and head.endswith(("/", "_")) and _matches(name, (pattern,)):
            rest = name.removeprefix(head).removesuffix(tail)
            return rest.removesuffix("_s") if head == "time/" else rest
    return name.rsplit("/", 1)[-1].removeprefix("num_")


def _tool_recipes(log: MetricLog) -> list[_Recipe]:
    tools = tool_names(log, RL)
    recipes = [
        _Recipe(title="Tool use", names=("rollout/tool_use", "rollout/calls_ok"), unit="share"),
        _Recipe(title="Calls by tool", names=("rollout/calls/*",), unit="per trajectory"),
    ]
    for tool in tools:
        head = f"rollout/tool/{tool}/"
        recipes.append(
            _Recipe(
                title=f"Seconds of a call: {tool}",
                names=(f"{head}latency_*_s",),
                unit="s",
            )
        )
        outcomes = tuple(f"{head}num_{status.value}" for status in ToolStatus)
        recipes.append(
            _Recipe(title=f"Outcomes: {tool}", names=outcomes, unit="calls", stacked=True)
        )
    return recipes


def tool_names(log: MetricLog, stage: str, prefix: str = "rollout/tool/") -> list[str]:
    """Tools that have metrics, in order of the alphabet."""
    heads = {
        name.removeprefix(prefix).split("/", 1)[0]
        for name in log.names(stage)
        if name.startswith(prefix)
    }
    return sorted(heads)


def _ares_recipes(log: MetricLog) -> list[_Recipe]:
    buckets = [
        _Recipe(title=f"Per bucket: {what}", names=(f"ares/*/{what}",)) for what in _ARES_BY_BUCKET
    ]
    return [*buckets, _Recipe(title="Entropy threshold", names=("ares/threshold",), unit="nats")]


def _sft_charts(log: MetricLog) -> list[Chart]:
    found = []
    for title, name, unit in (
        ("Supervised loss", "loss", "nats per token"),
        ("Success on development questions", "dev/success", "share"),
        ("Gradient norm, warm start", "grad_norm", ""),
    ):
        points = log.series(SFT, name)
        if points:
            series = [Series(name=name, points=points)]
            found.append(Chart(title=title, series=series, unit=unit))
    return found
