r"""Records of a rollout: prompts, engine requests, tool outcomes, trajectories and trees.

Each response token has an id, a loss mask (1 if the policy sampled it), the engine's log-prob and
exact entropy, the weight version it was sampled with and the index of its turn. Lengths are checked
on construction. Text is for people and rewards; training reads token ids only.

Example of a trajectory with one tool call (response tokens only)::

    turn 0 assistant  <think> a </think> <python> 1+1 </python>      loss_mask 1
    turn 1 tool       <result> 2 </result>                           loss_mask 0
    turn 2 assistant  <answer> \boxed{2} </answer> <eos>             loss_mask 1
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any

from mega_agentrl.errors import InputError
from mega_agentrl.types.images import ImageInput, PlacedImage
from mega_agentrl.types.routes import TokenRoutes

Message = dict[str, Any]
"""A chat message: ``{"role": str, "content": str}``, or with images a list of parts as content:
``{"type": "text", "text": str}`` and ``{"type": "image", "image": ImageInput}``."""

_MAX_REPR_CHARS = 60


class StopReason(StrEnum):
    """Why a trajectory ended."""

    eos = "eos"
    """The policy ended its turn without a tool call."""
    stop = "stop"
    """A stop string ended the turn, but the text contains no tool call."""
    length = "length"
    """The response reached its token limit."""
    turn_limit = "turn_limit"
    """The trajectory reached `rollout.max_turns`."""
    call_limit = "call_limit"
    """The trajectory reached `rollout.max_tool_calls`."""
    time_limit = "time_limit"
    """The policy's calls and answers, or an agent between them, took as long as
    `rollout.trajectory_timeout_s` or the agent's `timeout_s`."""
    trajectory_timeout = "trajectory_timeout"
    """Engines, tools before they ran, or simulated users took as long."""
    invalid_call = "invalid_call"
    """The policy wrote an invalid tool call, with `rollout.on_invalid_call=stop`."""
    interaction_end = "interaction_end"
    """The simulated user ended the conversation."""
    interaction_limit = "interaction_limit"
    """The simulated user reached its number of messages."""
    tool_failure = "tool_failure"
    """A tool or the simulated user failed."""
    policy_error = "policy_error"
    """The agent of `rollout.agent` raised an error that the policy causes
    (`rollout.agent.policy_errors`)."""
    agent_crash = "agent_crash"
    """The agent of `rollout.agent`, a command in a sandbox, failed after an answer of the policy,
    which may have caused that."""
    agent_failure = "agent_failure"
    """The agent of `rollout.agent` raised another error or returned no reward."""
    aborted = "aborted"
    """The engine aborted the request."""

    @property
    def is_failure(self) -> bool:
        """Whether the infrastructure, not the policy, ended the trajectory.

        Such a trajectory is masked. What a policy can cause does not belong here: it could drop its
        bad attempts.
        """
        return self in (
            StopReason.tool_failure,
            StopReason.agent_failure,
            StopReason.aborted,
            StopReason.trajectory_timeout,
        )


class FinishReason(StrEnum):
    """Why an engine call ended."""

    eos = "eos"
    stop = "stop"
    length = "length"
    aborted = "aborted"


class ToolStatus(StrEnum):
    """Result of a tool call."""

    ok = "ok"
    """The call succeeded."""
    user_error = "user_error"
    """The policy's code or arguments failed; the policy sees the message."""
    timeout = "timeout"
    """The call exceeded its time limit."""
    infra_error = "infra_error"
    """The tool or its sandbox failed, through no fault of the policy."""


class Role(StrEnum):
    """Author of a span of a response."""

    assistant = "assistant"
    tool = "tool"
    user = "user"


def _check_lengths(record: str, **lengths: int) -> None:
    if len(set(lengths.values())) > 1:
        raise InputError(f"{record}, lengths", lengths, "one length for all of these")


@dataclass(slots=True, kw_only=True, frozen=True)
class Prompt:
    """A question of the dataset with its token ids."""

    prompt_id: str
    """Id made of data source and index, stable across runs and epochs."""
    data_source: str
    """Name of the data source; selects the reward."""
    messages: tuple[Message, ...]
    ground_truth: Any
    """The row's `reward_model.ground_truth`: any JSON value, None if the row has none. Parts that
    compare texts read it through `ground_truth.accepted_answers`."""
    token_ids: tuple[int, ...]
    """[P] ids of the rendered chat template, generation prompt included."""
    tools_kwargs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By tool name, the keyword arguments of its `create`, `execute`, `calc_reward` and `release`.
    The keys select the tools that the prompt is offered."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the dataset row."""
    tool_schemas: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the offered tools, as the chat template rendered them into `token_ids`."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the messages, in order; starts count `token_ids`. Pixels are not loaded."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerateRequest:
    """A request to an engine."""

    request_id: str
    """Unique id, with which the request can be aborted."""
    token_ids: tuple[int, ...]
    """Context: the prompt and the response so far."""
    max_tokens: int
    """Maximum number of tokens to sample."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling threshold; 1 disables it."""
    top_k: int = 0
    """Number of most probable tokens to sample from; 0 disables it."""
    seed: int | None = None
    """Sampling seed; None samples unseeded."""
    stop: tuple[str, ...] = ()
    """Strings after which generation ends; the string stays in the output."""
    num_top_logps: int = 0
    """K of `Generation.top_logps`; 0 leaves them out."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the context with their pixels, in order; starts count `token_ids`."""
    routes_start: int | None = None
    """First token of the context whose routes the caller does not know yet; None asks for none."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Generation:
    """Result of a request to an engine; all sequences have length N."""

    request_id: str
    token_ids: tuple[int, ...]
    """[N] sampled token ids."""
    logps: tuple[float, ...]
    """[N] log-prob of each sampled token at the sampling temperature, before top-k and top-p."""
    entropies: tuple[float, ...]
    """[N] exact full-vocabulary entropy in nats of the same distribution (at temperature 1 for
    greedy requests)."""
    argmax_ids: tuple[int, ...]
    """[N] most probable token at each position."""
    finish_reason: FinishReason
    """Why generation ended."""
    stop_string: str | None
    """Stop string that ended generation, if one did."""
    version: int
    """Weight version that sampled the tokens, or the last of them if there are several."""
    top_logps: tuple[tuple[float, ...], ...] = ()
    """Per position the log-probs at temperature 1 of the K most probable tokens, and of the sampled
    token where it is not among them, in no order. Empty unless requested."""
    num_cached_tokens: int = 0
    """Number of context tokens found in the KV cache."""
    versions: tuple[int, ...] = ()
    """[N] weight version per token if the weights changed during the request; empty if all tokens
    have `version`."""
    routes: TokenRoutes | None = None
    """Routes of context and sampled tokens from `GenerateRequest.routes_start` to the last but one,
    after which nothing was computed; None if they were not asked for or the model has no experts.
    """

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
    """A tool call parsed from the policy's text."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class InvalidToolCall:
    """A tool call that cannot be parsed."""

    tool: str
    """Name of the tool, as far as it can be read."""
    message: str
    """Error message for the policy, control tags escaped."""


@dataclass(slots=True, kw_only=True, frozen=True)
class AssistantText:
    """The text of an assistant turn, taken apart."""

    reasoning: str
    """Chain of thought, without its markers; empty without one."""
    content: str
    """Text outside of the reasoning and of the calls. Calls that cannot be parsed stay in it."""
    calls: tuple[ToolCall, ...]


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolOutcome:
    """Typed result of a tool call."""

    tool: str
    status: ToolStatus
    answer: str
    """Text for the policy, control tags escaped."""
    latency_s: float
    """Duration of the call itself."""
    queue_s: float = 0.0
    """Time the call waited for the tool's limit on concurrent calls."""
    step_reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the tool reports."""
    is_invalid_call: bool = False
    """Whether the call was invalid, so that nothing was run."""
    images: tuple[bytes | ImageInput, ...] = ()
    """Images that the tool answers with; the policy sees them before the text. Files as the tool
    gave them, and records of them once `ImageLoader.check_answer` has accepted them."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Turn:
    """A span [start, stop) of response tokens written by one author.

    Answers to several calls of one assistant turn are one turn each. They are encoded together, so
    the last of these turns spans the tokens of all and the others are empty.
    """

    index: int
    """Position in `Trajectory.turns`."""
    role: Role
    """Author of the span."""
    start: int
    """First response token."""
    stop: int
    """One past the last response token."""
    text: str
    outcome: ToolOutcome | None = None
    """Outcome of the tool call, for tool turns."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Score:
    """Reward of a trajectory and how it came about."""

    value: float
    """The reward."""
    correct: bool
    """Whether the accuracy reached `reward.correct_threshold`."""
    f1: float
    """Token F1 of the answer, in [0, 1]."""
    answer: str
    """Answer extracted from the response."""
    reason: str
    """Why the trajectory got this reward, for people."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Weighted parts that add up to `value`, by name; empty if there is only one."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that parts returned beside their number, by name of the part."""


@dataclass(slots=True, kw_only=True, frozen=True)
class BranchDecision:
    """A decision of the branch policy, including decisions not to fork; entropies in nats."""

    path: tuple[int, ...]
    """Path of the trajectory that may fork."""
    position: int
    """Number of response tokens before the possible fork, right after a tool's answer."""
    num_slots_left: int
    """Forks that the path could still make."""
    baseline_entropy: float
    """Entropy of the root's first probe."""
    probe_entropies: tuple[float, ...]
    """Entropies of the tokens that were sampled to decide."""
    num_forks: int
    """Number of forks made here."""
    probability: float | None = None
    """Branching probability P of the policy's rule; None if it computes none."""
    threshold: float | None = None
    """Threshold tau of the policy's rule; None if it has none."""

    @property
    def delta_h(self) -> float | None:
        """Mean probe entropy minus the baseline, in nats; None for an empty probe."""
        return fmean(self.probe_entropies) - self.baseline_entropy if self.probe_entropies else None


@dataclass(slots=True, kw_only=True, frozen=True)
class ContextReset:
    """A change of the context that a trajectory is sampled in.

    Response tokens from `start` on were sampled after the context `token_ids`, followed by the
    response from `start`, instead of after the prompt and the whole response. This happens where
    the chat template renders earlier turns differently.
    """

    start: int
    """First response token sampled in the new context."""
    token_ids: tuple[int, ...]
    """The new context."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the new context; starts count `token_ids`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerationRoutes:
    """The routes that came with one generation of a trajectory."""

    response_start: int
    """Number of response tokens before the sampled ones."""
    context_length: int
    """Number of tokens of the context that they were sampled in."""
    routes: TokenRoutes
    """Routes of this context and of the sampled tokens; positions count from its first token."""

    def before(self, response_stop: int) -> GenerationRoutes:
        """Return the routes of the tokens before a position of the response."""
        stop = self.context_length + response_stop - self.response_start
        return GenerationRoutes(
            response_start=self.response_start,
            context_length=self.context_length,
            routes=self.routes.before(stop),
        )


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """A path of a rollout tree from the prompt to its end; sequences have length N."""

    trajectory_id: str
    prompt: Prompt
    path: tuple[int, ...]
    """Position in the tree: root r is ``(r,)``, the c-th fork of a path appends c."""
    token_ids: list[int]
    """[N] response token ids."""
    loss_mask: list[int]
    """[N] 1 for tokens that the policy sampled."""
    logps: list[float]
    """[N] sampling log-probs from the engine."""
    entropies: list[float]
    """[N] exact entropies in nats from the engine."""
    versions: list[int]
    """[N] weight version per token; tool tokens have the version of the turn with their call."""
    turn_ids: list[int]
    """[N] index into `turns` per token."""
    turns: list[Turn]
    stop_reason: StopReason
    """Why the trajectory ended."""
    parent_id: str | None = None
    """Trajectory that this one was forked from; None for a root."""
    fork_len: int = 0
    """Number of response tokens shared with the parent; 0 for a root."""
    num_tool_calls: int = 0
    baseline_entropy: float | None = None
    """Mean entropy in nats of the root's first probe; inherited by forks."""
    score: Score | None = None
    """The reward, once it is known."""
    tool_rewards: dict[str, float] = field(default_factory=dict)
    """Final reward by tool name; step rewards are in the outcomes of `turns`."""
    decisions: list[BranchDecision] = field(default_factory=list)
    """Branch decisions of this path, in order. Its c-th fork was made by the decision at which the
    running sum of `num_forks` first exceeds c; forks from paths that have ended have none."""
    context_resets: tuple[ContextReset, ...] = ()
    """Points, in order, from which the sampling context is not simply prompt and response."""
    request_counts: Mapping[str, int] = field(default_factory=dict)
    """Of an agent: `requests`, `branches` that they began, and by `ignored/FIELD` those with a
    field that has no effect; empty for the native loop."""
    template_drift: str = ""
    """Text that the full chat template renders instead of the conversation, where it differs; empty
    if it does not or was not checked."""
    topk_entropy_error: float | None = None
    """Mean difference in nats between the top-k estimate and the exact entropies of the tokens
    that this path sampled itself; None unless `rollout.branch.entropy_estimate_top_k` is set."""
    reward_error: str = ""
    """Why the reward could not be computed; empty if it could."""
    reward_abstained: bool = False
    """Whether the reward functions gave no score on purpose."""
    argmax_ids: Sequence[int] = field(default_factory=lambda: array("i"))
    """[N] most probable token per position, -1 where nothing was sampled; empty if not recorded. An
    int32 array, to save memory."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the response, which tools answered with, in order; starts count its tokens."""
    routes: tuple[GenerationRoutes, ...] = ()
    """Routes of the prompt and the response, in order; each entry continues the one before it,
    unless the context was reset in between. Files of trees leave them out."""

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
            expected = f"0 to {len(self.token_ids)}, the number of its response tokens"
            raise InputError(f"{self.trajectory_id}, fork_len", self.fork_len, expected)

    def __repr__(self) -> str:
        """Return id, size, end and the beginning of the text on one line, without the tokens."""
        text = self.response_text
        text = text if len(text) <= _MAX_REPR_CHARS else f"{text[:_MAX_REPR_CHARS]}..."
        forked = "" if self.parent_id is None else f"forked at token {self.fork_len}, "
        return (
            f"<Trajectory {self.trajectory_id}: {len(self.token_ids)} tokens, {forked}"
            f"stop {self.stop_reason}, {text!r}>"
        )

    @property
    def failed(self) -> bool:
        """Whether the infrastructure ended the trajectory or it has no reward.

        Failed trajectories are kept and shown, but masked from the loss. Those without a reward on
        purpose (`reward_abstained`) are among them; counts of failures leave them out.
        """
        return self.stop_reason.is_failure or self.reward_error != "" or self.reward_abstained

    @property
    def failure_reason(self) -> str:
        """Why the trajectory failed, for people; empty if it did not."""
        if self.reward_error:
            return self.reward_error
        if self.reward_abstained:
            return "the reward functions gave no score"
        if not self.stop_reason.is_failure:
            return ""
        for turn in reversed(self.turns):
            if turn.outcome is not None and turn.outcome.status is ToolStatus.infra_error:
                return f"{self.stop_reason.value}: {turn.outcome.tool}: {turn.outcome.answer}"
        return self.stop_reason.value

    @property
    def num_invalid_calls(self) -> int:
        """Number of invalid calls: malformed JSON, an unknown tool or wrong arguments."""
        return sum(turn.outcome is not None and turn.outcome.is_invalid_call for turn in self.turns)

    @property
    def step_rewards(self) -> dict[str, list[float]]:
        """Step rewards by tool name, one per call, including calls in a shared prefix."""
        rewards: dict[str, list[float]] = {}
        for turn in self.turns:
            if turn.outcome is not None:
                rewards.setdefault(turn.outcome.tool, []).append(turn.outcome.step_reward)
        return rewards

    @property
    def response_text(self) -> str:
        """Text of the whole response, tool answers included."""
        return "".join(turn.text for turn in self.turns)


@dataclass(slots=True, kw_only=True)
class RolloutTree:
    """All trajectories of a prompt."""

    prompt: Prompt
    trajectories: Sequence[Trajectory]
    """Trajectories in path order, parents first."""
    num_forks: int = 0
    """Number of forked trajectories."""
    num_extra_roots: int = 0
    """Number of additional roots beside the planned ones, instead of forks or after them."""
    num_abandoned_forks: int = 0
    """Forks that were given up, because an agent did not repeat its requests up to the fork."""
    greedy_trajectory: Trajectory | None = None
    """Greedy answer to the prompt, if requested; not a member of the group."""

    def __repr__(self) -> str:
        """Return the id of the prompt and the short forms of the trajectories on one line."""
        return f"<RolloutTree {self.prompt.prompt_id}: {self.all_trajectories!r}>"

    @property
    def all_trajectories(self) -> list[Trajectory]:
        """The trajectories, followed by the greedy answer if there is one."""
        return [
            *self.trajectories,
            *([] if self.greedy_trajectory is None else [self.greedy_trajectory]),
        ]
