"""Evaluation on fixed questions: samples at a temperature, and greedy answers beside them.

Never branches, never updates anything: the engine's weights are the only input, and random streams
have names of their own, so that training goes on as if there had been none. The reward is the one
that is trained on, a reward model's part of it included.

Numbers are also told apart by data source, and where a source has questions of one turn and of
several (`extra_info.turns`, as BFCL has) by these: `success/bfcl`, `success/bfcl/single_turn`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import sqrt
from statistics import stdev
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.choices import Branching
from mega_agentrl.rollout.collector import collect
from mega_agentrl.rollout.metrics import rollout_metrics
from mega_agentrl.train.pass_at import pass_metrics
from mega_agentrl.train.rewards import add_model_scores, report_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.types.parts import Parts
    from mega_agentrl.types.records import Prompt, RolloutTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Means over all answers: `metrics` by name, reward and success also by data source.

    reward_se: standard error of the reward, from the spread of the questions' means. at: pass@k
    and mean@k (`pass_at`), also by data source, `pass@4/bfcl`.
    """

    num_questions: int
    num_samples: int
    reward: float
    reward_se: float
    success: float
    reward_by_source: Mapping[str, float]
    success_by_source: Mapping[str, float]
    metrics: Mapping[str, float]
    at: Mapping[str, float] = field(default_factory=dict)

    def as_metrics(self, prefix: str) -> dict[str, float]:
        """Flat metrics under a prefix."""
        flat = {"reward": self.reward, "reward_se": self.reward_se, "success": self.success}
        flat |= {f"reward/{source}": value for source, value in self.reward_by_source.items()}
        flat |= {f"success/{source}": value for source, value in self.success_by_source.items()}
        flat |= self.at
        # Parts of the reward may be called as data sources are.
        flat |= {_below_rollout(name): value for name, value in self.metrics.items()}
        return {f"{prefix}/{name}": value for name, value in flat.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The validation questions, sampled and, if asked for, answered greedily."""

    sampled: Evaluation
    greedy: Evaluation | None

    def to_plain(self) -> dict[str, Any]:
        """Numbers, maps and None only; survives JSON and `from_plain` exactly."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> HeldOut:
        """What `to_plain` wrote; raises `ValueError` for anything else."""
        try:
            greedy = plain["greedy"]
            return cls(
                sampled=Evaluation(**plain["sampled"]),
                greedy=None if greedy is None else Evaluation(**greedy),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"held-out evaluation: cannot be read ({error!r}); expected `sampled` and "
                "`greedy`; probable cause: a checkpoint of another version"
            ) from error

    def as_metrics(self) -> dict[str, float]:
        """Flat metrics for the log."""
        return self.sampled.as_metrics("sampled") | (
            self.greedy.as_metrics("greedy") if self.greedy else {}
        )


def evaluate_held_out(
    parts: Parts,
    config: TrainConfig,
    keep: Callable[[str, Sequence[RolloutTree]], None] | None = None,
) -> HeldOut:
    """Evaluate on `data.validation` as `evaluate.*` says.

    keep: gets the trees of each pass with the end of its name, "" or "_greedy".
    """
    chosen = config.evaluate
    questions = parts.validation[: chosen.num_questions or None]
    sampled = evaluate(
        parts,
        config,
        questions,
        num_samples=chosen.num_samples,
        temperature=chosen.temperature,
        name="held-out",
        keep=None if keep is None else partial(keep, ""),
    )
    greedy = None
    if chosen.greedy:
        greedy = evaluate(
            parts,
            config,
            questions,
            num_samples=1,
            temperature=0.0,
            name="held-out-greedy",
            keep=None if keep is None else partial(keep, "_greedy"),
        )
    return HeldOut(sampled=sampled, greedy=greedy)


def evaluate(
    parts: Parts,
    config: TrainConfig,
    questions: Sequence[Prompt],
    *,
    num_samples: int,
    temperature: float,
    name: str,
    keep: Callable[[Sequence[RolloutTree]], None] | None = None,
) -> Evaluation:
    """Sample `num_samples` answers to each question; temperature 0 is greedy.

    name: keys the random streams, so that two evaluations with one name and seed draw alike.
    keep: gets the trees.
    """
    rollout = replace(
        config.rollout,
        num_trajectories=num_samples,
        branching=Branching.none,
        top_p=1.0,
        top_k=0,
    )
    trees = parts.wait(
        collect(
            questions,
            generator=parts.generator,
            tools=parts.tools,
            codec=parts.codec,
            interactions=parts.interactions,
            rubric=parts.rubric,
            config=rollout,
            max_model_len=config.engine.max_model_len,
            seed=config.seed,
            step=name,
            temperature=temperature,
            spans=parts.watch.spans,
        )
    )
    add_model_scores(parts, trees)
    report_missing(trees)
    if keep is not None:
        keep(trees)
    return summarize(trees, num_samples=num_samples)


def summarize(trees: Sequence[RolloutTree], *, num_samples: int) -> Evaluation:
    """Means over the answers of finished trees."""
    reward: defaultdict[str, list[float]] = defaultdict(list)
    question_means: list[float] = []
    success: defaultdict[str, list[float]] = defaultdict(list)
    everything: list[tuple[float, float]] = []
    right_by_question: defaultdict[str, list[list[bool]]] = defaultdict(list)
    for tree in trees:
        scores = [t.score for t in tree.trajectories if t.score is not None]
        if not scores:
            continue
        values, right = [score.value for score in scores], [float(one.correct) for one in scores]
        question_means.append(_mean(values))
        everything += zip(values, right, strict=True)
        right_by_question[""].append([score.correct for score in scores])
        for name in _sources(tree.prompt):
            reward[name] += values
            success[name] += right
            right_by_question[name].append([score.correct for score in scores])
    return Evaluation(
        num_questions=len(trees),
        num_samples=num_samples,
        reward=_mean([value for value, _ in everything]),
        reward_se=_standard_error(question_means),
        success=_mean([right for _, right in everything]),
        reward_by_source={source: _mean(values) for source, values in sorted(reward.items())},
        success_by_source={source: _mean(values) for source, values in sorted(success.items())},
        metrics=rollout_metrics(trees),
        at={
            f"{measure}/{source}" if source else measure: value
            for source, questions in sorted(right_by_question.items())
            for measure, value in pass_metrics(questions, num_samples).items()
        },
    )


def _sources(prompt: Prompt) -> list[str]:
    """The data source, and its part that the question belongs to where it has parts."""
    turns = prompt.extra_info.get("turns")
    names = [prompt.data_source]
    return [*names, f"{prompt.data_source}/{turns}"] if isinstance(turns, str) else names


def _below_rollout(name: str) -> str:
    return name if name.startswith("rollout/") else f"rollout/{name}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
