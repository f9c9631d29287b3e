"""Records of a rollout: prompts, engine requests, tool outcomes, trajectories and trees.

A token carries where it came from for life: its id, whether the policy sampled it, the
engine's log-prob and exact entropy, the weight version it was sampled with and its turn.
Lengths are checked on construction. Text is for people and rewards; training reads ids only.

Example, a trajectory of one tool call (response tokens only)::

    turn 0 assistant  <think> a </think> <python> 1+1 </python>      loss_mask 1
    turn 1 tool       <result> 2 </result>                           loss_mask 0
    turn 2 assistant  <answer> \\boxed{2} </answer> <eos>             loss_mask 1
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any

Message = dict[str, Any]
"""One chat message: ``{"role": str, "content": str}``."""


class StopReason(StrEnum):
    """Why a trajectory ended.

    eos, stop: the policy ended its turn, or a call that was none ended it. length, turn_limit,
    call_limit, wall_time: a budget. bad_call: under `rollout.on_bad_call=stop`.
    interaction_end, interaction_limit: the environment had enough, or had spoken often enough.
    tool_failure, aborted: tools (the environment is one) or engine failed.
    """

    eos = "eos"
    stop = "stop"
    length = "length"
    turn_limit = "turn_limit"
    call_limit = "call_limit"
    wall_time = "wall_time"
    bad_call = "bad_call"
    interaction_end = "interaction_end"
    interaction_limit = "interaction_limit"
    tool_failure = "tool_failure"
    aborted = "aborted"

    @property
    def is_failure(self) -> bool:
        """Ended through our own fault. The wall clock is one: how fast engines and tools are is
        not the policy's doing."""
        return self in (StopReason.tool_failure, StopReason.aborted, StopReason.wall_time)


class Finish(StrEnum):
    """Why one engine call ended."""

    eos = "eos"
    stop = "stop"
    length = "length"
    aborted = "aborted"


class ToolStatus(StrEnum):
    """How one tool call went. `infra_error` is ours, `user_error` the policy's."""

    ok = "ok"
    user_error = "user_error"
    timeout = "timeout"
    infra_error = "infra_error"


class Author(StrEnum):
    """Who wrote a span of a response."""

    assistant = "assistant"
    tool = "tool"
    user = "user"


def _check_lengths(record: str, **lengths: int) -> None:
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"{record}: all of these must have one length, got {got}")


@dataclass(slots=True, kw_only=True, frozen=True)
class Prompt:
    """One question as the dataset gives it, with its token ids.

    prompt_id: stable over runs and epochs (data source and index).
    token_ids: [P] the chat template's output with the generation prompt.
    tools_kwargs: per tool name, its create/execute/calc_reward/release kwargs; the keys
        choose the tools the prompt is offered.
    tool_schemas: what the chat template rendered of these tools into `token_ids`.
    """

    prompt_id: str
    data_source: str
    messages: tuple[Message, ...]
    ground_truth: str | tuple[str, ...]
    token_ids: tuple[int, ...]
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    tool_schemas: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerateRequest:
    """One engine call. `temperature` 0 is greedy; `seed` None is unseeded sampling.

    stop: strings after which generation ends; the string itself stays in the output.
    num_top_logps: K to get `Generation.top_logps`, 0 for none.
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    num_top_logps: int = 0


@dataclass(slots=True, kw_only=True, frozen=True)
class Generation:
    """What one engine call produced; all sequences have length N.

    logps: log-prob of each sampled token at the sampling temperature, before top-k / top-p.
    entropies: exact full-vocabulary entropy in nats of the same distribution (at
        temperature 1 for greedy requests).
    argmax_ids: most probable token at each position.
    version: weight version the tokens were sampled with.
    top_logps: per position the log-probs, at temperature 1, of the K most probable tokens and
        of the sampled one where it is not among them; in no order, empty unless asked for.
    num_cached: tokens of the request that were found in the KV cache and not computed again.
    versions: per position, where the weights changed in the middle; empty: all are `version`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logps: tuple[float, ...]
    entropies: tuple[float, ...]
    argmax_ids: tuple[int, ...]
    finish: Finish
    stop_string: str | None
    version: int
    top_logps: tuple[tuple[float, ...], ...] = ()
    num_cached: int = 0
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_lengths(
            f"Generation {self.request_id}",
            token_ids=len(self.token_ids),
            logps=len(self.logps),
            entropies=len(self.entropies),
            argmax_ids=len(self.argmax_ids),
            top_logps=len(self.top_logps or self.token_ids),
            versions=len(self.versions or self.token_ids),
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolCall:
    """One call as parsed from what the policy wrote."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class BadCall:
    """What was meant as a call and cannot be read. message: for the policy, escaped."""

    tool: str
    message: str


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolOutcome:
    """The typed result of one tool call; `answer` is what the tool said, control tags escaped.

    latency_s: of the call itself; queue_s: what it waited before, for the tool's limit on
    concurrent calls. bad_call: nothing was run, the policy wrote the call wrongly.
    """

    tool: str
    status: ToolStatus
    answer: str
    latency_s: float
    queue_s: float = 0.0
    step_reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    bad_call: bool = False


@dataclass(slots=True, kw_only=True, frozen=True)
class Turn:
    """A span [start, stop) of response tokens written by one author.

    Several answers that came in together are a turn each, whose tokens are all the last one's.
    """

    index: int
    author: Author
    start: int
    stop: int
    text: str
    outcome: ToolOutcome | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class Score:
    """What a trajectory earned and why.

    value: the reward. correct: accuracy reached the threshold. f1: token F1 in [0, 1].
    parts: what `value` is the sum of, by name; empty where it has one part only.
    fields: what parts said beside their number, by the name of the part; as JSON has it.
    """

    value: float
    correct: bool
    f1: float
    answer: str
    reason: str
    parts: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, frozen=True)
class Decision:
    """One question to the branch policy and its answer, "no" included; entropies in nats.

    path: who asked. at: response tokens before the place asked about, right behind a tool's
        answer. slots: forks it could still make. baseline: of the root.
    probe_entropies: what was read to decide. num_forks: how many forks were made here.
    probability, threshold: P and tau of the policy's law; None where it had none to apply.
    """

    path: tuple[int, ...]
    at: int
    slots: int
    baseline: float
    probe_entropies: tuple[float, ...]
    num_forks: int
    probability: float | None = None
    threshold: float | None = None

    @property
    def delta_h(self) -> float | None:
        """Mean entropy of the probe minus the baseline, nats; None of an empty probe."""
        return fmean(self.probe_entropies) - self.baseline if self.probe_entropies else None


@dataclass(slots=True, kw_only=True, frozen=True)
class Restart:
    """From response token `start` on, tokens were sampled behind `token_ids` and each other."""

    start: int
    token_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One path of a rollout tree from the prompt to its end; sequences have length N.

    path: position in the tree: root r is ``(r,)``, the c-th fork of a path appends c.
    parent_id / fork_len: the trajectory it was forked from and how many response tokens
        the two physically share; None / 0 for a root.
    versions: weight version per token (tool tokens carry the version of their turn's call).
    turn_ids: index into `turns` per token.
    baseline_entropy: mean entropy of the root's first probe, nats; inherited by forks.
    tool_rewards: final reward by tool name; step rewards are in the turns' outcomes.
    decisions: what it asked the branch policy itself, in order: its c-th fork was made by the
        decision at which their `num_forks` add up to more than c.
    no_reward: why its reward could not be had; empty where it could.
    failed: ended through our own fault, or has no reward: kept, shown, masked from the loss.
    restarts: where the context that was sampled in is not prompt and response, in order.
    topk_gap: mean distance of the top-k estimate to the exact entropies of its own tokens, nats;
        None where nobody asked (`rollout.branch.estimate_top_k`).
    template_drift: what the full chat template makes of the conversation instead, where it
        differs; empty where it does not or nobody looked.
    argmax_ids: most probable token at each position, -1 where nothing was sampled; empty where
        nobody kept them. An array, as four bytes a token are enough.
    """

    trajectory_id: str
    prompt: Prompt
    path: tuple[int, ...]
    token_ids: list[int]
    loss_mask: list[int]
    logps: list[float]
    entropies: list[float]
    versions: list[int]
    turn_ids: list[int]
    turns: list[Turn]
    stop_reason: StopReason
    parent_id: str | None = None
    fork_len: int = 0
    num_calls: int = 0
    baseline_entropy: float | None = None
    score: Score | None = None
    tool_rewards: dict[str, float] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    restarts: tuple[Restart, ...] = ()
    template_drift: str = ""
    topk_gap: float | None = None
    no_reward: str = ""
    argmax_ids: Sequence[int] = field(default_factory=lambda: array("i"))

    def __post_init__(self) -> None:
        _check_lengths(
            f"Trajectory {self.trajectory_id}",
            token_ids=len(self.token_ids),
            loss_mask=len(self.loss_mask),
            logps=len(self.logps),
            entropies=len(self.entropies),
            versions=len(self.versions),
            turn_ids=len(self.turn_ids),
            argmax_ids=len(self.argmax_ids or self.token_ids),
        )
        if not 0 <= self.fork_len <= len(self.token_ids):
            raise ValueError(
                f"Trajectory {self.trajectory_id}: fork_len {self.fork_len} is outside "
                f"0..{len(self.token_ids)}, the number of its response tokens"
            )

    @property
    def failed(self) -> bool:
        """True where the environment, not the policy, ended it, or left it without a reward."""
        return self.stop_reason.is_failure or self.no_reward != ""

    @property
    def num_bad_calls(self) -> int:
        """Calls the policy wrote wrongly: no JSON, no such tool, arguments that do not fit."""
        return sum(turn.outcome is not None and turn.outcome.bad_call for turn in self.turns)

    @property
    def step_rewards(self) -> dict[str, list[float]]:
        """Step rewards by tool name, one per call, those of a shared prefix included."""
        rewards: dict[str, list[float]] = {}
        for turn in self.turns:
            if turn.outcome is not None:
                rewards.setdefault(turn.outcome.tool, []).append(turn.outcome.step_reward)
        return rewards

    @property
    def response_text(self) -> str:
        """Everything after the prompt as text, tool answers included."""
        return "".join(turn.text for turn in self.turns)


@dataclass(slots=True, kw_only=True)
class RolloutTree:
    """All trajectories of one prompt, in path order (parents first), and how they came to be.

    num_forks / num_top_ups: how many of them were forked and how many fresh roots filled
        the group up after the forks.
    greedy: the greedy answer to the prompt where one was asked for; not of the group.
    """

    prompt: Prompt
    trajectories: Sequence[Trajectory]
    num_forks: int = 0
    num_top_ups: int = 0
    greedy: Trajectory | None = None

    @property
    def with_greedy(self) -> list[Trajectory]:
        """The trajectories, and the greedy answer behind them."""
        return [*self.trajectories, *([] if self.greedy is None else [self.greedy])]
