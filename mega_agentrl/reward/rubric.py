"""What a trajectory earns: a weighted sum of named parts, chosen by its data source.

    value = sum over the parts of its data source of weight * part

The first part of a source decides about `correct`, `f1`, `answer` and `reason`. Parts:

    arpo, arpo_released, function_call, accuracy    see the modules; computed at once
    a tool, or a simulated user     its step rewards and its final reward; 0 where it was not used
    a function of the user's own    in worker processes, see `user_function`
    model                           of an address, see `judge`; of a folder, see below

A score that waits for functions or for an address is a future. What a reward model in a folder
says is not known to a rubric: it reads whole batches, and `with_model` adds it afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import CallMatch
from mega_agentrl.config.reward_schema import DEFAULT_SOURCE, MODEL_PART
from mega_agentrl.reward import arpo, function_call
from mega_agentrl.reward.ares import accuracy
from mega_agentrl.reward.when_all import when_all
from mega_agentrl.types.records import Author, Score

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from mega_agentrl.config.reward_schema import RewardConfig
    from mega_agentrl.reward.judge import Judge
    from mega_agentrl.reward.user_function import UserFunction, UserScore
    from mega_agentrl.types.records import Prompt, Trajectory


class WeightedRubric:
    """Scores a finished trajectory by the parts of its data source; a `ports.Rubric`."""

    def __init__(
        self,
        config: RewardConfig,
        functions: Mapping[str, UserFunction] | None = None,
        judge: Judge | None = None,
    ) -> None:
        """functions: by the name of their part. judge: the part `model` where it is an address."""
        self._config = config
        self._functions = functions or {}
        self._judge = judge

    def score(self, trajectory: Trajectory) -> Score | Future[Score]:
        """See `Rubric.score`; without functions and an address it is there at once."""
        known: dict[str, Score] = {}
        waiting: dict[str, Future[Score]] = {}
        weights = self._weights(trajectory.prompt)
        for name in weights:
            if name in self._functions:
                waiting[name] = self._own(name, trajectory)
            elif name == MODEL_PART and self._judge is not None:
                waiting[name] = self._asked(self._judge, trajectory)
            elif name != MODEL_PART:
                known[name] = self._at_once(name, trajectory)
        if not waiting:
            return _sum(weights, known)
        return when_all(waiting, lambda came: _sum(weights, known | came))

    def needs_model(self, prompt: Prompt) -> bool:
        """See `Rubric.needs_model`."""
        return self._judge is None and MODEL_PART in self._weights(prompt)

    def with_model(self, trajectory: Trajectory, value: float) -> Score:
        """See `Rubric.with_model`; value: what the model says, without its weight."""
        assert trajectory.score is not None, "a trajectory without a reward was given to the model"
        weights = self._weights(trajectory.prompt)
        said = self._number(value, f"the reward model says {value:.4g}")
        first = said if next(iter(weights)) == MODEL_PART else trajectory.score
        part = weights[MODEL_PART] * value
        if len(weights) == 1:
            return replace(said, value=part)
        given = {**trajectory.score.parts, MODEL_PART: part}
        parts = {name: given[name] for name in weights}
        return replace(
            first, value=sum(parts.values()), parts=parts, fields=trajectory.score.fields
        )

    def _weights(self, prompt: Prompt) -> Mapping[str, float]:
        rubric = self._config.by_source
        weights = rubric.get(prompt.data_source) or rubric.get(DEFAULT_SOURCE)
        assert weights, f"check_prompts comes first: {prompt.data_source} has no rubric"
        return weights

    def _at_once(self, name: str, trajectory: Trajectory) -> Score:
        threshold, truth = self._config.correct_threshold, trajectory.prompt.ground_truth
        match name:
            case "arpo":
                return arpo.score_strict(trajectory, threshold)
            case "arpo_released":
                return arpo.score(trajectory.response_text, truth, threshold)
            case "accuracy":
                return accuracy(_said(trajectory), truth, threshold=threshold)
            case "function_call":
                match = self._config.match
                kind = "string" if match is CallMatch.string else "ast"
                ordered = match is CallMatch.ast_ordered
                return function_call.score(_said(trajectory), truth, match=kind, ordered=ordered)
            case _:
                steps, final = trajectory.step_rewards, trajectory.tool_rewards
                value = sum(steps.get(name, ())) + final.get(name, 0.0)
                return self._number(value, f"{name} gave {value:.4g}")

    def _own(self, name: str, trajectory: Trajectory) -> Future[Score]:
        asked = self._functions[name].submit(
            data_source=trajectory.prompt.data_source,
            solution=trajectory.response_text,
            ground_truth=trajectory.prompt.ground_truth,
            extra_info=trajectory.prompt.extra_info,
        )

        def read(came: Mapping[str, UserScore]) -> Score:
            said = came[name]
            score = self._number(said.value, f"{name} gave {said.value:.4g}")
            return replace(score, fields={name: dict(said.fields)}) if said.fields else score

        return when_all({name: asked}, read)

    def _asked(self, judge: Judge, trajectory: Trajectory) -> Future[Score]:
        asked = judge.submit(
            trajectory.prompt.messages, _said(trajectory), trajectory.prompt.ground_truth
        )

        def read(came: Mapping[str, float]) -> Score:
            return self._number(came[MODEL_PART], f"the judge says {came[MODEL_PART]:.4g}")

        return when_all({MODEL_PART: asked}, read)

    def _number(self, value: float, reason: str) -> Score:
        """The score of a part that is a number and no more."""
        correct = value >= self._config.correct_threshold
        return Score(value=value, correct=correct, f1=float(correct), answer="", reason=reason)


def _sum(weights: Mapping[str, float], scores: Mapping[str, Score]) -> Score:
    """The score of the parts that are there; those of a model in a folder come later."""
    parts = {name: weights[name] * scores[name].value for name in weights if name in scores}
    fields = {key: value for score in scores.values() for key, value in score.fields.items()}
    first = scores.get(next(iter(weights)), _UNKNOWN)
    return replace(
        first,
        value=sum(parts.values()),
        parts=parts if len(weights) > 1 else {},
        fields=fields,
    )


_UNKNOWN = Score(value=0.0, correct=False, f1=0.0, answer="", reason="not yet read by the model")


def _said(trajectory: Trajectory) -> str:
    """What the policy wrote."""
    return "".join(turn.text for turn in trajectory.turns if turn.author is Author.assistant)
