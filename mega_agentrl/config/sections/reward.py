"""Settings of the reward (`reward.*`): weighted parts for each data source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mega_agentrl.config.enums import FunctionCallMatch
from mega_agentrl.config.errors import check_range
from mega_agentrl.config.ranges import MAX_TIMEOUT_S, Range, Section

DEFAULT_SOURCE = "default"
FUNCTION_CALL_SOURCES = (
    "function_calling",
    "bfcl",
    "xlam-function-calling",
    "open_agentic_tool_use",
)
"""Data sources whose answers are function calls."""
ANSWER_LINE_SOURCES = (
    "math_dapo",
    "aime",
    "aime_2024",
    "aime_2025",
    "aime24",
    "aime25",
    "aime2024",
    "aime2025",
)
"""Data sources of DAPO, whose prompts ask for a last line with `Answer:`."""
MODEL_PART = "model"
BUILT_IN_PARTS = ("arpo", "arpo_released", "function_call", "accuracy", MODEL_PART)
FUNCTION_NAME = "compute_score"
"""Name of a user function whose reference has none."""
FUNCTION_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments of verl's reward functions, which a user function is called with."""
OPTIONAL_FUNCTION_ARGUMENTS = ("messages", "num_turns", "stop_reason", "tool_rewards")
"""Keyword arguments that only user functions get that name them."""
KNOWN_FUNCTION_ARGUMENTS = (
    *FUNCTION_ARGUMENTS,
    *OPTIONAL_FUNCTION_ARGUMENTS,
    *(f"{name}s" for name in FUNCTION_ARGUMENTS),  # batched functions of verl
    *("reward_inputs", "reward_input"),  # EasyR1
    *("prompts", "completions"),  # TRL
)
"""Arguments that a user function may need; `reward.user_call` says in which form."""
FUNCTION_EXPECTED = (
    f"a function, or a class with __call__, that is called with {', '.join(FUNCTION_ARGUMENTS)} or "
    "some of these"
)
"""Description of a user function, for errors."""


@dataclass
class RewardModelConfig(Section, key="reward.model"):
    """The reward part `model`: a learned reward model."""

    path_or_url: str = ""
    """Folder of a Hugging Face checkpoint with a score head, which Megatron serves beside the
    policy; or the URL of an OpenAI-compatible server (`http://host:8000/v1`), whose answer is
    parsed as a number. Required if a rubric has the part."""
    served_model_name: str = ""
    """Name of the model on the server; required with a URL."""
    api_key_env: str = ""
    """Environment variable that holds the server's API key; empty for none."""

    prompt_file: str = ""
    """File with a Jinja template of what a judge behind a URL reads; empty for the built-in one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(
            self.is_remote or not self.prompt_file,
            "reward.model.prompt_file",
            self.prompt_file,
            "none unless reward.model.path_or_url is a URL",
        )
        check_range(
            not self.is_remote or bool(self.served_model_name),
            "reward.model.served_model_name",
            self.served_model_name,
            f"the name of a model with reward.model.path_or_url={self.path_or_url}",
        )

    @property
    def is_remote(self) -> bool:
        """Whether the reward model is behind a URL."""
        return self.path_or_url.startswith(("http://", "https://"))


@dataclass
class RewardConfig(Section, key="reward"):
    r"""The reward of a trajectory: a weighted sum of named parts.

    Parts are `arpo` (scores the text), `arpo_released` (the published rule), `function_call`,
    `accuracy` (the answer in `\boxed` or after `Answer:`), `model`, a key of `functions`, or the
    name of a tool, whose step rewards and final reward are added.
    """

    rubric: Annotated[
        dict[str, dict[str, float]], Range(at_least=-1_000_000, at_most=1_000_000)
    ] = field(default_factory=dict)
    """Weight of each part by data source; `default` applies to all other sources
    (`+reward.rubric.default={arpo:1,gsm8k:0.5}`). If empty, data sources of function calls use
    `function_call`, those of DAPO and AIME `accuracy`, and all others `arpo`. The first part of a
    source decides whether an answer is correct."""
    functions: dict[str, str] = field(default_factory=dict)
    """User functions by part name (`+reward.functions.mine=/folder/file.py:compute_score`, or
    `package.module:compute_score`)."""
    correct_threshold: Annotated[float, Range(at_least=-1_000_000_000, at_most=1_000_000_000)] = 1.0
    """Accuracy, or reward of a user function, from which an answer is correct."""
    function_call_match: FunctionCallMatch = FunctionCallMatch.ast
    """Comparison of function calls with the expected ones."""
    num_workers: Annotated[int, Range(at_least=1, at_most=4096)] = 2
    """Processes that run user functions."""
    timeout_s: Annotated[float, Range(above=0, at_most=MAX_TIMEOUT_S, unit="s")] = 30.0
    """Timeout of a call of a user function or of the reward model."""
    worker_env_vars: list[str] = field(default_factory=list)
    """Environment variables that the processes of user functions may see."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The reward model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for source, parts in self.rubric.items():
            key = f"reward.rubric.{source}"
            check_range(bool(parts), key, parts, "at least one part with its weight")
        for name in self.functions:
            check_range(
                name not in BUILT_IN_PARTS,
                f"reward.functions.{name}",
                self.functions[name],
                f"another name: {', '.join(BUILT_IN_PARTS)} are built in",
            )
        check_range(
            MODEL_PART not in self.part_names or bool(self.model.path_or_url),
            "reward.model.path_or_url",
            self.model.path_or_url,
            "a folder or a URL, because reward.rubric has the part model",
        )

    @property
    def weights_by_source(self) -> dict[str, dict[str, float]]:
        """The rubric with its default resolved.

        The default is not on the field, because OmegaConf would merge a run's rubric into it.
        """
        if self.rubric:
            return self.rubric
        calls = {source: {"function_call": 1.0} for source in FUNCTION_CALL_SOURCES}
        answers = {source: {"accuracy": 1.0} for source in ANSWER_LINE_SOURCES}
        return {DEFAULT_SOURCE: {"arpo": 1.0}, **calls, **answers}

    def weights_for(self, source: str) -> dict[str, float]:
        """Return the weights of a data source; empty if neither it nor the default has any."""
        weights = self.weights_by_source
        return weights.get(source) or weights.get(DEFAULT_SOURCE) or {}

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of all parts in use, without duplicates."""
        return tuple(
            dict.fromkeys(name for parts in self.weights_by_source.values() for name in parts)
        )

    @property
    def hosts_reward_model(self) -> bool:
        """Whether Megatron serves a reward model beside the policy."""
        return MODEL_PART in self.part_names and not self.model.is_remote
