"""Settings of the reward (`reward.*`): which parts, with which weights, for which data."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from mega_agentrl.config.choices import CallMatch
from mega_agentrl.config.ranges import require

DEFAULT_SOURCE = "default"
FUNCTION_CALL_SOURCES = (
    "function_calling",
    "bfcl",
    "xlam-function-calling",
    "open_agentic_tool_use",
)
"""Values of `data_source` whose answers are function calls."""
MODEL_PART = "model"
BUILT_IN_PARTS = ("arpo", "arpo_released", "function_call", "accuracy", MODEL_PART)


@dataclass
class RewardModelConfig:
    """The part `model`: a learned judge.

    source: folder of a Hugging Face checkpoint with a score head, which Megatron serves beside
    the policy; or the address of an OpenAI-compatible server (`http://host:8000/v1`), whose
    answer is read as a number. name: of the model at that address. key_env: environment
    variable that holds its key, empty for none.
    """

    source: str = ""
    name: str = ""
    key_env: str = ""

    def __post_init__(self) -> None:
        require(
            not self.served_elsewhere or bool(self.name),
            "reward.model.name",
            repr(self.name),
            f"the name of a model with reward.model.source={self.source}",
        )

    @property
    def served_elsewhere(self) -> bool:
        """Whether the source is an address."""
        return self.source.startswith(("http://", "https://"))


@dataclass
class RewardConfig:
    """What a trajectory earns: a weighted sum of named parts.

    rubric: by data source the weight of each part; `default` is for sources that are not named
    (`+reward.rubric.default={arpo:1,gsm8k:0.5}`). Nothing at all is `function_call` for the
    sources whose answers are calls, `arpo` for all others. The first part of a source decides
    which answer is correct. Parts: `arpo` (reads what the model wrote), `arpo_released` (the
    published rule), `function_call`, `accuracy` (a number or choice in `\\boxed`), `model`, a name
    of `functions`, or the name of a tool, whose step rewards and final reward are added.
    functions: import path of functions of one's own by the name of their part
    (`+reward.functions.mine=package.module:compute_score`).
    correct_threshold: accuracy from which an answer is correct; for a function of one's own, its
    reward. match: how function calls are compared.
    workers: processes for functions of one's own; deadline_s: limit of one call of theirs, and of
    one of the reward model; environment: names of variables those processes may see.
    """

    rubric: dict[str, dict[str, float]] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    correct_threshold: float = 1.0
    match: CallMatch = CallMatch.ast
    workers: int = 2
    deadline_s: float = 30.0
    environment: list[str] = field(default_factory=list)
    model: RewardModelConfig = field(default_factory=RewardModelConfig)

    def __post_init__(self) -> None:
        for source, parts in self.rubric.items():
            key = f"reward.rubric.{source}"
            require(bool(parts), key, parts, "at least one part with its weight")
            for name, weight in parts.items():
                require(isfinite(weight), f"{key}.{name}", weight, "a finite number")
        for name in self.functions:
            require(
                name not in BUILT_IN_PARTS,
                f"reward.functions.{name}",
                self.functions[name],
                f"another name, {', '.join(BUILT_IN_PARTS)} are built in",
            )
        require(self.workers >= 1, "reward.workers", self.workers, "at least 1")
        require(self.deadline_s > 0, "reward.deadline_s", self.deadline_s, "above 0")
        require(
            MODEL_PART not in self.parts or bool(self.model.source),
            "reward.model.source",
            repr(self.model.source),
            "a folder or an address, reward.rubric has the part model",
        )

    @property
    def by_source(self) -> dict[str, dict[str, float]]:
        """The rubric, with its default resolved.

        As the default of the field it would stay beside what a run names, which is merged into it.
        """
        if self.rubric:
            return self.rubric
        calls = {source: {"function_call": 1.0} for source in FUNCTION_CALL_SOURCES}
        return {DEFAULT_SOURCE: {"arpo": 1.0}, **calls}

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all parts in use, each once."""
        return tuple(dict.fromkeys(name for parts in self.by_source.values() for name in parts))

    @property
    def serves_model(self) -> bool:
        """Whether a reward model in a folder runs beside the policy."""
        return MODEL_PART in self.parts and not self.model.served_elsewhere
