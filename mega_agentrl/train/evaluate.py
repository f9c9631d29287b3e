"""Evaluation on fixed questions: answers sampled at a temperature, and greedy ones.

An evaluation never branches and changes no state. It depends on the engine's weights alone and has
random streams of its own, so it does not affect training. The reward is that of training, including
a reward model's part.

Results are also split by data source, and for sources with single-turn and multi-turn questions
(`extra_info.turns`, as in BFCL) by these: `success/bfcl`, `success/bfcl/single_turn`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import comb, sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import Branching
from mega_agentrl.rollout.collector import collect_rollouts
from mega_agentrl.rollout.context import make_rollout_context
from mega_agentrl.rollout.metrics.failures import FailureCounts, count_failures
from mega_agentrl.rollout.metrics.rollout import rollout_metrics
from mega_agentrl.train.rewards import add_reward_model_scores, warn_missing_rewards

if TYPE_CHECKING:
    from collections.abc import Callable

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.rollout.metrics.names import NamesOfRun
    from mega_agentrl.types.components import Components
    from mega_agentrl.types.records import Prompt, RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Means over all scored answers of an evaluation."""

    num_questions: int
    num_samples: int
    """Samples per question, of the question with the most rows if rows repeat questions."""
    reward: float
    reward_se: float
    """Standard error of the reward, from the spread of the questions' means."""
    success: float
    reward_by_source: Mapping[str, float]
    """Mean reward by data source."""
    success_by_source: Mapping[str, float]
    """Mean success by data source."""
    metrics: Mapping[str, float]
    """Rollout metrics by name."""
    pass_at_k: Mapping[str, float] = field(default_factory=dict)
    """pass@k and mean@k by name, also by data source: `pass@4/bfcl`."""
    failures: FailureCounts = field(default_factory=FailureCounts)
    """Counts of all answers and of the failed ones, which are in no mean."""
    failures_by_source: Mapping[str, FailureCounts] = field(default_factory=dict)
    """Failures by data source, also for a source without any scored answer."""
    question_means: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    """Reward and success of each question with a scored answer, by data source (empty for all) and
    prompt id."""

    def to_metrics(self, prefix: str) -> dict[str, float]:
        """Return flat metrics, named with a prefix."""
        flat = {"reward": self.reward, "reward_se": self.reward_se, "success": self.success}
        flat |= {f"reward/{source}": value for source, value in self.reward_by_source.items()}
        flat |= {f"success/{source}": value for source, value in self.success_by_source.items()}
        flat |= self.pass_at_k
        for suffix, counts in [
            ("", self.failures),
            *((f"/{source}", counts) for source, counts in self.failures_by_source.items()),
        ]:
            flat[f"num_answers{suffix}"] = float(counts.num_trajectories)
            flat[f"num_scored{suffix}"] = float(counts.num_scored)
        # Parts of the reward may have the names of data sources.
        flat |= {_with_rollout_prefix(name): value for name, value in self.metrics.items()}
        return {f"{prefix}/{name}": value for name, value in flat.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """Results on the validation questions."""

    sampled: EvalResult
    """Result of sampled answers."""
    greedy: EvalResult | None
    """Result of greedy answers; None unless `evaluate.greedy` is set."""

    def to_metrics(self) -> dict[str, float]:
        """Return flat metrics for the log."""
        return self.sampled.to_metrics("sampled") | (
            self.greedy.to_metrics("greedy") if self.greedy else {}
        )


def evaluate_validation_set(
    components: Components,
    config: TrainConfig,
    save_trees: Callable[[str, Sequence[RolloutTree]], None] | None = None,
    metric_names: NamesOfRun | None = None,
) -> ValidationResult:
    """Evaluate on `data.validation` with the settings of `evaluate`.

    `save_trees` is called with the name suffix ("" or "_greedy") and the trees of each pass, and
    `metric_names` are the names in the metrics of the run so far.
    """
    settings = config.evaluate
    questions = first_questions(components.validation_prompts, settings.num_questions)
    sampled = evaluate(
        components,
        config,
        questions,
        num_samples=settings.num_samples,
        temperature=settings.temperature,
        name="held-out",
        save_trees=None if save_trees is None else partial(save_trees, ""),
        metric_names=metric_names,
    )
    greedy = None
    if settings.greedy:
        greedy = evaluate(
            components,
            config,
            questions,
            num_samples=1,
            temperature=0.0,
            name="held-out-greedy",
            save_trees=None if save_trees is None else partial(save_trees, "_greedy"),
            metric_names=metric_names,
        )
    return ValidationResult(sampled=sampled, greedy=greedy)


def first_questions(prompts: Sequence[Prompt], num_questions: int) -> list[Prompt]:
    """Return the prompts of the first questions, all rows of each; 0 returns all prompts."""
    chosen = set(
        list(dict.fromkeys(prompt.prompt_id for prompt in prompts))[: num_questions or None]
    )
    return [prompt for prompt in prompts if prompt.prompt_id in chosen]


def evaluate(
    components: Components,
    config: TrainConfig,
    questions: Sequence[Prompt],
    *,
    num_samples: int,
    temperature: float,
    name: str,
    save_trees: Callable[[Sequence[RolloutTree]], None] | None = None,
    metric_names: NamesOfRun | None = None,
) -> EvalResult:
    """Sample `num_samples` answers to each question and return their means.

    Two evaluations with the same `name`, seed and weights sample the same answers. Temperature 0 is
    greedy. `save_trees` is called with the trees.
    """
    rollout = replace(
        config.rollout,
        group_size=num_samples,
        branching=Branching.none,
        top_p=1.0,
        top_k=0,
    )
    trees = sample_trees(
        components, replace(config, rollout=rollout), questions, step=name, temperature=temperature
    )
    warn_missing_rewards(trees, "are in no mean of the evaluation")
    if save_trees is not None:
        save_trees(trees)
    return compute_eval_result(trees, num_samples=num_samples, metric_names=metric_names)


def sample_trees(
    components: Components,
    config: TrainConfig,
    prompts: Sequence[Prompt],
    *,
    step: str,
    temperature: float | None = None,
) -> list[RolloutTree]:
    """Return a scored tree for each prompt, with `rollout.group_size` trajectories.

    `step` names the pass, on which the seeds depend. Without a `temperature`,
    `rollout.temperature` is used.
    """
    context = make_rollout_context(
        generator=components.generator,
        tools=components.tools,
        codec=components.codec,
        interactions=components.interactions,
        config=config.rollout,
        max_model_len=config.engine.max_model_len,
        seed=config.seed,
        step=step,
        temperature=temperature,
        spans=components.monitors.rollout_spans,
        images=components.images,
        agents=components.agents,
    )
    trees = components.run_coroutine(collect_rollouts(prompts, components.rubric, context))
    add_reward_model_scores(components, trees)
    return trees


def compute_eval_result(
    trees: Sequence[RolloutTree], *, num_samples: int, metric_names: NamesOfRun | None = None
) -> EvalResult:
    """Return the means over the answers of finished trees.

    Trees of prompts with the same id are answers to one question.

    Args:
        trees: the trees.
        num_samples: answers in each tree.
        metric_names: names in the metrics of the run so far.
    """
    reward: defaultdict[str, list[float]] = defaultdict(list)
    question_means: list[float] = []
    success: defaultdict[str, list[float]] = defaultdict(list)
    all_scores: list[tuple[float, float]] = []
    correct_by_question: defaultdict[str, list[list[bool]]] = defaultdict(list)
    failures_by_source: defaultdict[str, FailureCounts] = defaultdict(FailureCounts)
    means_by_source: defaultdict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    trees_by_question: defaultdict[str, list[RolloutTree]] = defaultdict(list)
    for tree in trees:
        trees_by_question[tree.prompt.prompt_id].append(tree)
    for prompt_id, question_trees in trees_by_question.items():
        names = _source_names(question_trees[0].prompt)
        for name in names:
            failures_by_source[name] += count_failures(question_trees)
        trajectories = [t for tree in question_trees for t in tree.trajectories]
        scores = [t.score for t in trajectories if t.score is not None]
        if not scores:
            continue
        values = [score.value for score in scores]
        is_correct = [float(score.correct) for score in scores]
        question_means.append(_mean(values))
        all_scores += zip(values, is_correct, strict=True)
        for name in ("", *names):
            correct_by_question[name].append([score.correct for score in scores])
            means_by_source[name][prompt_id] = _mean(values), _mean(is_correct)
        for name in names:
            reward[name] += values
            success[name] += is_correct
    num_samples *= max(map(len, trees_by_question.values()), default=1)
    return EvalResult(
        num_questions=len(trees_by_question),
        num_samples=num_samples,
        reward=_mean([value for value, _ in all_scores]),
        reward_se=_standard_error(question_means),
        success=_mean([is_correct for _, is_correct in all_scores]),
        reward_by_source={source: _mean(values) for source, values in sorted(reward.items())},
        success_by_source={source: _mean(values) for source, values in sorted(success.items())},
        metrics=rollout_metrics(trees, metric_names),
        pass_at_k={
            f"{measure}/{source}" if source else measure: value
            for source, questions in sorted(correct_by_question.items())
            for measure, value in pass_at_k_metrics(questions, num_samples).items()
        },
        failures=count_failures(trees),
        failures_by_source=dict(sorted(failures_by_source.items())),
        question_means=dict(means_by_source),
    )


def pass_at_k(num_correct: int, num_answers: int, k: int) -> float:
    """Return the probability that one of k of the answers is right; 1 <= k <= num_answers.

    If c of n answers are right, k of them drawn without replacement contain no right one with
    probability C(n - c, k) / C(n, k), so 1 minus it is unbiased (Chen et al., arXiv 2107.03374).
    """
    return 1.0 - comb(num_answers - num_correct, k) / comb(num_answers, k)


def pass_at_k_metrics(is_correct: Sequence[Sequence[bool]], num_samples: int) -> dict[str, float]:
    """Return `pass@1`, `pass@2`, `pass@4`, ... up to num_samples, and `mean@<num_samples>`.

    They are means over questions. A question with fewer than k valid answers, because the
    infrastructure failed, is left out of pass@k.

    Args:
        is_correct: For each question, whether each valid answer is right.
        num_samples: Answers per question. With 1 the result is empty, because it would equal the
            success.
    """
    if num_samples < 2:
        return {}
    metrics: dict[str, float] = {}
    k = 1
    while k <= num_samples:
        values = [
            pass_at_k(sum(answers), len(answers), k) for answers in is_correct if len(answers) >= k
        ]
        if values:
            metrics[f"pass@{k}"] = fmean(values)
        k *= 2
    means = [fmean(map(float, answers)) for answers in is_correct if answers]
    if means:
        metrics[f"mean@{num_samples}"] = fmean(means)
    return metrics


def _source_names(prompt: Prompt) -> list[str]:
    """Return the data source and, if the question has `turns`, the part of the source."""
    turns = prompt.extra_info.get("turns")
    names = [prompt.data_source]
    return [*names, f"{prompt.data_source}/{turns}"] if isinstance(turns, str) else names


def _with_rollout_prefix(name: str) -> str:
    return name if name.startswith("rollout/") else f"rollout/{name}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
