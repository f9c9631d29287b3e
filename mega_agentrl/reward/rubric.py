"""Computes the reward of a trajectory as a weighted sum of the parts of its data source.

    value = sum over the parts of weight * part,    |part| <= MAX_PART

The rubric of a data source (`reward.rubric`) lists its parts and their weights. The first part
determines `correct`, `f1`, `answer` and `reason`. A part is one of:

    arpo, arpo_released, function_call, accuracy    built in; `registry` says how to add a part
    name of a tool or simulated user                sum of its step rewards and its final reward
    name of a user function                         computed in worker processes (`user_reward`)
    model                                           an LLM judge at a URL (`llm_judge`), or a reward
                                                    model in a folder

The score is a future if the rubric has user functions or a judge, or if a built-in part compares
expressions in a child process. A reward model in a folder reads
whole batches; its part is added afterwards by `add_model_score`.

No part is larger than `MAX_PART`, whoever computes it: a function, judge or model, a tool or
simulated user, an environment or agent. A larger one is a `RewardError`.

`check_rubric_parts` and `check_prompt_rubrics` check the rubrics against the tools and the data of
a run before anything starts. Worker processes check user functions when they start.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.reward import BUILT_IN_PARTS, DEFAULT_SOURCE, MODEL_PART
from mega_agentrl.errors import InputError
from mega_agentrl.reward import ares, arpo, function_call  # noqa: F401  they register their parts
from mega_agentrl.reward.conversation import row_values, tool_rewards
from mega_agentrl.reward.registry import REWARDS
from mega_agentrl.sandbox.worker_main import to_json
from mega_agentrl.types.errors import RewardAbstainedError, RewardError
from mega_agentrl.types.records import Score

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from mega_agentrl.config.sections.reward import RewardConfig
    from mega_agentrl.reward.llm_judge import LLMJudge
    from mega_agentrl.reward.user_reward import UserRewardFunction, UserRewardResult
    from mega_agentrl.types.records import Prompt, Trajectory

MAX_PART = 1e9
"""Largest absolute value of a part before its weight: the range of `reward.correct_threshold`. With
the largest weight, 1e6, the squares of a batch's rewards still fit into float32."""

_NUM_SUGGESTIONS = 3
_ARPO_TAG = "<answer>"
_logger = logging.getLogger(__name__)
_PENDING_SCORE = Score(
    value=0.0, correct=False, f1=0.0, answer="", reason="not yet scored by the reward model"
)


def check_rubric_parts(config: RewardConfig, names: Collection[str]) -> None:
    """Check that every part of the rubrics exists exactly once.

    Args:
        config: the rubrics.
        names: names of the run's tools and simulated users.

    Raises:
        ValueError: a part does not exist, or its name is ambiguous.
    """
    for name in names:
        if name in BUILT_IN_PARTS or name in config.functions:
            if name in config.part_names:
                raise ConfigError(
                    "reward.rubric",
                    name,
                    "different names; rename the tool, or the function under reward.functions",
                    "it is the name of a tool or simulated user and of another part",
                )
    known_names = (*BUILT_IN_PARTS, *config.functions, *names)
    for source, weights in config.weights_by_source.items():
        for name, weight in weights.items():
            if name not in known_names:
                near = get_close_matches(name, known_names, n=_NUM_SUGGESTIONS) or known_names
                raise ConfigError(
                    f"reward.rubric.{source}.{name}",
                    weight,
                    f"the weight of a part that exists, such as {', '.join(near)}",
                    "a mistyped name, or tool.user_tools_file, rollout.interaction_config_file or "
                    "reward.functions is not set",
                )


def check_prompt_rubrics(config: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Check that every prompt has a rubric whose parts can score it.

    Logs a warning for each data source whose prompts never ask for the format that `arpo` reads.

    Raises:
        ValueError: a prompt has no rubric, or a part cannot read its ground truth or extra info.
    """
    asks_for_tags: dict[str, bool] = {}
    for prompt in prompts:
        source = prompt.data_source
        weights = config.weights_for(source)
        if "arpo" in weights and not asks_for_tags.get(source):
            asks_for_tags[source] = _ARPO_TAG in str([m.get("content") for m in prompt.messages])
        if not weights:
            raise InputError(
                f"prompt {prompt.prompt_id}, data source",
                source,
                f"one of reward.rubric, {', '.join(config.weights_by_source)}; {DEFAULT_SOURCE} "
                "there stands for all others",
                "a mistyped data source, or data of another kind",
            )
        try:
            _check_prompt_parts(config, weights, prompt)
        except InputError as error:
            name = f"prompt {prompt.prompt_id}, {error.name}"
            raise InputError(name, error.got, error.expected, error.cause) from error
        except ValueError as error:  # of a part that a user registered
            expected = "one that its parts can score"
            raise InputError(f"prompt {prompt.prompt_id}", str(error), expected) from error
    for source in [source for source, asks in asks_for_tags.items() if not asks]:
        _logger.warning(
            "no prompt of the data source %s asks for %s, without which the reward part arpo gives "
            "-1; for answers in \\boxed{} or after `Answer:` use '+reward.rubric.%s={accuracy:1}'",
            source,
            _ARPO_TAG,
            source,
        )


def _check_prompt_parts(config: RewardConfig, weights: Collection[str], prompt: Prompt) -> None:
    for name in weights:
        if name in REWARDS and (check := REWARDS[name].check) is not None:
            check(prompt, config)
    if any(name in config.functions for name in weights):
        try:
            to_json(dict(prompt.extra_info))
        except ValueError as error:
            expected = "values that JSON has, because reward functions get it as JSON"
            raise InputError("extra_info", str(error), expected) from error


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
        """Return the score, or its future if a part needs another process or a server.

        The part of a reward model in a folder is left out (`add_model_score`).
        """
        scores: dict[str, Score] = {}
        futures: dict[str, Future[Any]] = {}
        weights = self._part_weights(trajectory.prompt)
        for name in weights:
            if name in self._functions:
                futures[name] = self._submit_user_function(name, trajectory)
            elif name == MODEL_PART and self._judge is not None:
                futures[name] = self._submit_judge(self._judge, trajectory)
            elif name != MODEL_PART:
                score = self._compute_part(name, trajectory)
                if isinstance(score, Future):
                    futures[name] = score
                else:
                    scores[name] = score
        if not futures:
            try:
                return _weighted_sum(weights, scores)
            except RewardError as error:
                failed: Future[Score] = Future()
                failed.set_exception(error)
                return failed
        return gather_futures(
            futures, lambda results: _weighted_sum(weights, {**scores, **results})
        )

    def needs_reward_model(self, prompt: Prompt) -> bool:
        """Return whether the prompt's rubric has a part from a reward model in a folder."""
        return self._judge is None and MODEL_PART in self._part_weights(prompt)

    def add_model_score(self, trajectory: Trajectory, value: float) -> Score:
        """Return the score of a trajectory with the part of the reward model added.

        Args:
            trajectory: a trajectory with a score of the other parts.
            value: output of the reward model, not yet multiplied with the weight of the part.

        Raises:
            RewardError: the output is not finite or larger than `MAX_PART`.
        """
        _check_part(MODEL_PART, value)
        assert trajectory.score is not None, "the trajectory has no score yet"
        weights = self._part_weights(trajectory.prompt)
        model_score = self._numeric_score(value, f"the reward model gave {value:.4g}")
        is_pending = trajectory.score.reason == _PENDING_SCORE.reason
        first_score = model_score if is_pending else trajectory.score
        weighted_value = weights[MODEL_PART] * value
        if len(weights) == 1:
            return replace(model_score, value=weighted_value)
        weighted_values = {**trajectory.score.parts, MODEL_PART: weighted_value}
        parts = {name: weighted_values[name] for name in weights if name in weighted_values}
        return replace(
            first_score,
            value=sum(parts.values()),
            parts=parts,
            extra_info=trajectory.score.extra_info,
        )

    def _part_weights(self, prompt: Prompt) -> Mapping[str, float]:
        weights = self._config.weights_for(prompt.data_source)
        assert weights, f"check_prompt_rubrics must run first: {prompt.data_source} has no rubric"
        return weights

    def _compute_part(self, name: str, trajectory: Trajectory) -> Score | Future[Score]:
        if name in REWARDS:
            return REWARDS[name].function(trajectory, self._config)
        value = tool_rewards(trajectory).get(name, 0.0)
        return self._numeric_score(value, f"{name} gave {value:.4g}")

    def _submit_user_function(self, name: str, trajectory: Trajectory) -> Future[Score | None]:
        """Return the future of the function's score, or of None if it gives none."""
        future = self._functions[name].submit(row_values(trajectory))

        def to_score(results: Mapping[str, UserRewardResult]) -> Score | None:
            value, fields = results[name].value, results[name].fields
            if value is None:
                return None
            score = self._numeric_score(value, f"{name} gave {value:.4g}")
            return replace(score, extra_info={name: dict(fields)}) if fields else score

        return gather_futures({name: future}, to_score)

    def _submit_judge(self, judge: LLMJudge, trajectory: Trajectory) -> Future[Score]:
        future = judge.submit(trajectory)

        def to_score(results: Mapping[str, float]) -> Score:
            value = results[MODEL_PART]
            return self._numeric_score(value, f"the judge gave {value:.4g}")

        return gather_futures({MODEL_PART: future}, to_score)

    def _numeric_score(self, value: float, reason: str) -> Score:
        """Return the score of a part that has only a value."""
        correct = value >= self._config.correct_threshold
        return Score(value=value, correct=correct, f1=float(correct), answer="", reason=reason)


def _weighted_sum(weights: Mapping[str, float], all_scores: Mapping[str, Score | None]) -> Score:
    """Return the score of the parts; that of a reward model in a folder is added later.

    Args:
        weights: weight of each part of the rubric by name.
        all_scores: score of each part by name, None for a user function that gave none, without
            that of a reward model in a folder.

    Raises:
        RewardAbstainedError: no part gave a score.
        RewardError: a part is not finite or larger than `MAX_PART`.
    """
    scores = {name: score for name, score in all_scores.items() if score is not None}
    for name, score in scores.items():
        _check_part(name, score.value)
    if all_scores and not scores and len(all_scores) == len(weights):
        raise RewardAbstainedError(f"{', '.join(all_scores)} returned None")
    parts = {name: weights[name] * scores[name].value for name in weights if name in scores}
    extra_info = {
        key: value for score in scores.values() for key, value in score.extra_info.items()
    }
    first = next(name for name in weights if all_scores.get(name, ...) is not None)
    first_score = scores.get(first, _PENDING_SCORE)
    return replace(
        first_score,
        value=sum(parts.values()),
        parts=parts if len(weights) > 1 else {},
        extra_info=extra_info,
    )


def _check_part(name: str, value: float) -> None:
    """Raise `RewardError` for a part that no reward can hold; NaN is one."""
    if not abs(value) <= MAX_PART:
        raise RewardError(
            f"reward part {name}: got {value!r}, expected a number between {-MAX_PART:g} and "
            f"{MAX_PART:g}"
        )


def gather_futures[InputT, ResultT](
    futures: Mapping[str, Future[InputT]], make: Callable[[dict[str, InputT]], ResultT]
) -> Future[ResultT]:
    """Return the joined future of several futures, without blocking.

    The joined future is resolved in the thread that resolves the last input, or the first input
    that fails. The first error of an input becomes the error of the joined future; a cancelled
    input counts as `CancelledError`. Cancelling the joined future cancels the inputs.

    Args:
        futures: the inputs by name.
        make: maps the results of the inputs by name to the result of the joined future.
    """
    joined_future: Future[ResultT] = Future()
    lock = threading.Lock()
    missing = set(futures)
    is_resolved = False

    def on_done(name: str, future: Future[InputT]) -> None:
        nonlocal is_resolved
        with lock:
            missing.discard(name)
            error = CancelledError() if future.cancelled() else future.exception()
            if is_resolved or (error is None and missing):
                return
            is_resolved = True
        if not joined_future.set_running_or_notify_cancel():
            return
        if error is not None:
            joined_future.set_exception(error)
            return
        try:
            result = make({key: future.result() for key, future in futures.items()})
        except Exception as make_error:  # noqa: BLE001  a callback: the error would be lost
            joined_future.set_exception(make_error)
        else:
            joined_future.set_result(result)

    for name, future in futures.items():
        future.add_done_callback(partial(on_done, name))
    joined_future.add_done_callback(
        lambda future: _cancel_all(futures) if future.cancelled() else None
    )
    return joined_future


def _cancel_all(futures: Mapping[str, Future[Any]]) -> None:
    for future in futures.values():
        future.cancel()
