"""Computes the reward of a trajectory as a weighted sum of parts, chosen by its data source.

    value = sum over the parts of its data source of weight * part

The first part of a source determines `correct`, `f1`, `answer` and `reason`. Parts:

    arpo, arpo_released, function_call, accuracy    computed at once
    name of a tool or simulated user                sum of its step rewards and its final reward
    name of a user function                         computed in worker processes (`user_reward`)
    model                                           an LLM judge at a URL (`llm_judge`), or a reward
                                                    model in a folder

The score is a future if user functions or a judge are involved. A reward model in a folder reads
whole batches; its part is added afterwards by `add_model_score`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import FunctionCallMatch
from mega_agentrl.config.sections.reward import DEFAULT_SOURCE, MODEL_PART
from mega_agentrl.reward import arpo, function_call
from mega_agentrl.reward.ares import accuracy
from mega_agentrl.reward.future_join import gather_futures
from mega_agentrl.types.records import Role, Score

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from mega_agentrl.config.sections.reward import RewardConfig
    from mega_agentrl.reward.llm_judge import LLMJudge
    from mega_agentrl.reward.user_reward import UserRewardFunction, UserRewardResult
    from mega_agentrl.types.records import Prompt, Trajectory


class WeightedRubric:
    """Scores finished trajectories by the parts of their data source; implements `Rubric`."""

    def __init__(
        self,
        config: RewardConfig,
        functions: Mapping[str, UserRewardFunction] | None = None,
        judge: LLMJudge | None = None,
    ) -> None:
        """Create the rubric.

        Args:
            config: weights and thresholds.
            functions: user functions by the name of their part.
            judge: the part `model` if it is a URL.
        """
        self._config = config
        self._functions = functions or {}
        self._judge = judge

    def score(self, trajectory: Trajectory) -> Score | Future[Score]:
        """Return the score, or its future if user functions or a judge take part."""
        known: dict[str, Score] = {}
        waiting: dict[str, Future[Score]] = {}
        weights = self._part_weights(trajectory.prompt)
        for name in weights:
            if name in self._functions:
                waiting[name] = self._submit_user_function(name, trajectory)
            elif name == MODEL_PART and self._judge is not None:
                waiting[name] = self._submit_judge(self._judge, trajectory)
            elif name != MODEL_PART:
                known[name] = self._compute_part(name, trajectory)
        if not waiting:
            return _weighted_sum(weights, known)
        return gather_futures(waiting, lambda scores: _weighted_sum(weights, known | scores))

    def needs_reward_model(self, prompt: Prompt) -> bool:
        """Return whether the prompt's rubric has a part from a reward model in a folder."""
        return self._judge is None and MODEL_PART in self._part_weights(prompt)

    def add_model_score(self, trajectory: Trajectory, value: float) -> Score:
        """Return the score with the model's part added; `value` is not weighted yet."""
        assert trajectory.score is not None, "the trajectory has no score yet"
        weights = self._part_weights(trajectory.prompt)
        model_score = self._numeric_score(value, f"the reward model says {value:.4g}")
        first = model_score if next(iter(weights)) == MODEL_PART else trajectory.score
        part = weights[MODEL_PART] * value
        if len(weights) == 1:
            return replace(model_score, value=part)
        weighted = {**trajectory.score.parts, MODEL_PART: part}
        parts = {name: weighted[name] for name in weights}
        return replace(
            first, value=sum(parts.values()), parts=parts, extra_info=trajectory.score.extra_info
        )

    def _part_weights(self, prompt: Prompt) -> Mapping[str, float]:
        rubric = self._config.weights_by_source
        weights = rubric.get(prompt.data_source) or rubric.get(DEFAULT_SOURCE)
        assert weights, f"check_prompt_rubrics must run first: {prompt.data_source} has no rubric"
        return weights

    def _compute_part(self, name: str, trajectory: Trajectory) -> Score:
        threshold, truth = self._config.correct_threshold, trajectory.prompt.ground_truth
        match name:
            case "arpo":
                return arpo.score_strict(trajectory, threshold)
            case "arpo_released":
                return arpo.score(trajectory.response_text, truth, threshold)
            case "accuracy":
                return accuracy(_assistant_text(trajectory), truth, threshold=threshold)
            case "function_call":
                match = self._config.function_call_match
                kind = "string" if match is FunctionCallMatch.string else "ast"
                ordered = match is FunctionCallMatch.ast_ordered
                return function_call.score(
                    _assistant_text(trajectory), truth, match=kind, ordered=ordered
                )
            case _:
                steps, final = trajectory.step_rewards, trajectory.tool_rewards
                value = sum(steps.get(name, ())) + final.get(name, 0.0)
                return self._numeric_score(value, f"{name} gave {value:.4g}")

    def _submit_user_function(self, name: str, trajectory: Trajectory) -> Future[Score]:
        future = self._functions[name].submit(
            data_source=trajectory.prompt.data_source,
            solution=trajectory.response_text,
            ground_truth=trajectory.prompt.ground_truth,
            extra_info=trajectory.prompt.extra_info,
        )

        def to_score(results: Mapping[str, UserRewardResult]) -> Score:
            result = results[name]
            score = self._numeric_score(result.value, f"{name} gave {result.value:.4g}")
            return (
                replace(score, extra_info={name: dict(result.fields)}) if result.fields else score
            )

        return gather_futures({name: future}, to_score)

    def _submit_judge(self, judge: LLMJudge, trajectory: Trajectory) -> Future[Score]:
        future = judge.submit(
            trajectory.prompt.messages, _assistant_text(trajectory), trajectory.prompt.ground_truth
        )

        def to_score(results: Mapping[str, float]) -> Score:
            value = results[MODEL_PART]
            return self._numeric_score(value, f"the judge says {value:.4g}")

        return gather_futures({MODEL_PART: future}, to_score)

    def _numeric_score(self, value: float, reason: str) -> Score:
        """Return the score of a part that consists of a number only."""
        correct = value >= self._config.correct_threshold
        return Score(value=value, correct=correct, f1=float(correct), answer="", reason=reason)


def _weighted_sum(weights: Mapping[str, float], scores: Mapping[str, Score]) -> Score:
    """Combine the parts that are known; a reward model in a folder is added later."""
    parts = {name: weights[name] * scores[name].value for name in weights if name in scores}
    fields = {key: value for score in scores.values() for key, value in score.extra_info.items()}
    first = scores.get(next(iter(weights)), _PENDING_SCORE)
    return replace(
        first,
        value=sum(parts.values()),
        parts=parts if len(weights) > 1 else {},
        extra_info=fields,
    )


_PENDING_SCORE = Score(
    value=0.0, correct=False, f1=0.0, answer="", reason="not yet scored by the reward model"
)


def _assistant_text(trajectory: Trajectory) -> str:
    """Return the text of all assistant turns."""
    return "".join(turn.text for turn in trajectory.turns if turn.role is Role.assistant)
