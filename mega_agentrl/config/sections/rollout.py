"""Settings of the rollout (`rollout.*`): sampling, branching, and which groups are trained on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from mega_agentrl.config.enums import (
    Branching,
    CallProtocol,
    FilterMetric,
    ForkBudgetMode,
    InvalidCallAction,
    TemplateCheck,
)
from mega_agentrl.config.errors import check_range
from mega_agentrl.config.ranges import (
    MAX_TIMEOUT_S,
    MAX_TOKENS,
    Length,
    Range,
    Section,
)
from mega_agentrl.config.user_code import is_user_code, parse_choice

MAX_GROUP_SIZE = 65_536
"""Maximum number of trajectories of a prompt."""
_MAX_LOGPROBS = 20
"""vLLM's default limit of log-probs per token."""
_WEIGHT = Range(at_least=-1_000_000, at_most=1_000_000)


@dataclass
class BranchConfig(Section, key="rollout.branch"):
    """Conditions under which a trajectory forks, and the number of forks.

    A trajectory forks when alpha + beta * (H - H_root) > tau (arXiv 2507.19849), where H is the
    mean entropy of the probe after a tool's answer. `rollout.branching=released` compares the left
    side with a random number instead of tau.
    """

    alpha: Annotated[float, _WEIGHT] = 0.5
    """Base of the branching probability."""
    beta: Annotated[float, _WEIGHT] = 0.2
    """Weight of the entropy change."""
    tau: Annotated[float, _WEIGHT] = 0.5
    """Threshold of the branching probability."""
    consecutive_penalty: Annotated[float, Range(at_least=0, at_most=1)] = 0.05
    """Fraction by which `rollout.branching=aepo` lowers the probability for every consecutive
    fork."""
    sibling_penalty: Annotated[float, Range(at_least=0, at_most=100, unit="nats")] = 0.05
    """Entropy that `rollout.branching=at2po` takes off a turn for every other turn sampled from the
    same state."""
    num_expansion_rounds: Annotated[int, Range(at_least=1, at_most=MAX_GROUP_SIZE)] = 2
    """Rounds in which `rollout.branching=at2po` starts its forks; each one chooses among the turns
    of all paths that have ended."""
    num_probe_tokens: Annotated[int, Range(at_least=0, at_most=MAX_TOKENS, unit="tokens")] = 20
    """Tokens sampled after a tool's answer whose mean entropy in nats is H; 0 never forks."""
    after_user_messages: bool = False
    """Also fork after messages of the simulated user, by the same rule as after tool answers."""
    initial_rollouts: Annotated[int | None, Range(at_least=1, at_most=MAX_GROUP_SIZE)] = None
    """Roots per prompt, N in ARPO; null is half of `rollout.group_size`, or, with aepo, a number
    computed from a first monitored root."""
    num_forks_per_decision: Annotated[int, Range(at_least=0, at_most=MAX_GROUP_SIZE)] = 1
    """Forks per decision, Z in ARPO (beam_size - 1 in the released code)."""
    fork_budget: ForkBudgetMode = ForkBudgetMode.partitioned
    """Distribution of a prompt's forks over its paths; `released` has its own rule."""
    entropy_estimate_top_k: Annotated[int, Range(at_least=0, at_most=_MAX_LOGPROBS)] = 0
    """Above 0, also estimate each entropy from the K most probable tokens, as the released code
    does, and report the error. Needs temperature 1."""


@dataclass
class GroupSelectionConfig(Section, key="rollout"):
    """Selection of the groups (all trajectories of a prompt) of a step, and the wait for them."""

    filter_metric: FilterMetric = FilterMetric.none
    """Metric by whose group mean groups are filtered; filtered groups are replaced by other
    prompts."""
    filter_range: Annotated[
        list[float],
        Length(at_least=2, at_most=2),
        Range(at_least=-1_000_000_000, at_most=1_000_000_000),
    ] = field(default_factory=lambda: [0.01, 0.99])
    """Open interval of the group mean within which a group is kept."""
    num_oversampled_prompts: Annotated[int, Range(at_least=0, at_most=1_000_000)] = 0
    """Prompts started in a step beyond `data.prompts_per_step`."""
    min_finished_fraction: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Fraction of `data.prompts_per_step` groups after which the straggler timeout starts."""
    straggler_timeout_s: Annotated[float, Range(at_least=0, at_most=MAX_TIMEOUT_S, unit="s")] = 0.0
    """Time that unfinished groups have after `rollout.min_finished_fraction` is reached; 0 is no
    limit."""
    partial_rollout: bool = False
    """Continue unfinished or surplus groups in the next step, with its weights, instead of dropping
    them."""
    max_staleness: Annotated[int, Range(at_least=0, at_most=1000, unit="steps")] = 0
    """Maximum age of a trained token in updates, and number of steps that sampling may be ahead of
    training. 0 is synchronous; 1 trains on a step while the next is sampled; above 1 sampling also
    continues after weights are sent. See `weight_sync.in_flight`, `algo.rollout_correction`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = self.filter_range
        check_range(
            ends[0] < ends[1], "rollout.filter_range", ends, "two numbers, the lower one first"
        )
        check_range(
            self.min_finished_fraction == 1 or self.straggler_timeout_s > 0,
            "rollout.straggler_timeout_s",
            self.straggler_timeout_s,
            f"more than 0 with rollout.min_finished_fraction={self.min_finished_fraction}, which "
            "has no effect without a timeout",
        )


@dataclass
class RolloutConfig(GroupSelectionConfig):
    """Sampling of trajectories and selection of the groups to train on (`GroupSelectionConfig`)."""

    group_size: Annotated[int, Range(at_least=1, at_most=MAX_GROUP_SIZE)] = 8
    """Trajectories per prompt, M in ARPO."""
    branching: str = "after_result"
    """Rule that decides where a trajectory forks: none, after_result (ARPO's paper), aepo, at2po,
    appo, released (ARPO's published code), or a user class: `package.module:Class` or
    `/folder/file.py:Class`."""
    branching_options: dict[str, Any] = field(default_factory=dict)
    """Values for options of a user's rule in place of their defaults."""
    branch: BranchConfig = field(default_factory=BranchConfig)
    """Parameters of all branching rules."""
    temperature: Annotated[float, Range(above=0, at_most=100)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Nucleus sampling threshold; 1 disables it."""
    top_k: Annotated[int, Range(at_least=0, at_most=1_000_000)] = 0
    """Number of most probable tokens to sample from; 0 disables it."""
    max_response_tokens: Annotated[int, Range(at_least=1, at_most=MAX_TOKENS, unit="tokens")] = 2048
    """Maximum number of response tokens of a trajectory, tool answers included."""
    max_turns: Annotated[int, Range(at_least=1, at_most=100_000)] = 8
    """Maximum number of assistant turns of a trajectory."""
    max_tool_calls: Annotated[int, Range(at_least=0, at_most=100_000)] = 3
    """Maximum number of tool calls of a trajectory."""
    trajectory_timeout_s: Annotated[float, Range(at_least=0, at_most=MAX_TIMEOUT_S, unit="s")] = 0.0
    """Maximum number of seconds that a trajectory may take for its own calls and answers, after
    which it is scored, and as many for waits on the run, after which it is masked; 0 is no limit. A
    fork continues its parent's clocks."""
    call_protocol: CallProtocol = CallProtocol.tags
    """Syntax of tool calls."""
    on_invalid_call: InvalidCallAction = InvalidCallAction.answer
    """Response to a tool call that cannot be run."""
    template_check: TemplateCheck = TemplateCheck.strict
    """Comparison of the finished conversation with the full chat template."""
    use_inference_chat_template: bool = False
    """Render the conversation anew for every turn instead of appending to the sampled tokens, for
    chat templates that drop earlier reasoning."""
    max_images_per_answer: Annotated[int, Range(at_least=0, at_most=1000)] = 4
    """Maximum number of images of a tool's answer; more are an error that the policy sees."""
    image_cache_mib: Annotated[int, Range(at_least=1, at_most=16_777_216, unit="MiB")] = 2048
    """Size up to which resized pixels of recent images are kept on the driver."""
    agent: dict[str, Any] = field(default_factory=dict)
    """The user's own agent in place of the native loop: `_target_`, a function or class as
    `FILE.py:NAME` or `package.module.NAME`, and its arguments. Nothing, or an empty `_target_`, is
    the native loop."""
    interaction_config_file: str = ""
    """Yaml list of simulated users; empty for none."""
    max_failed_fraction: Annotated[float, Range(at_least=0, at_most=1)] = 0.5
    """Share of failed trajectories above which the run stops, because means over the rest would
    mislead: at once in a held-out evaluation, after two steps in a row in training. Attempts whose
    agent crashed or whose time was over count as well. Trajectories that the engines aborted do not
    count. 1 never stops."""
    max_failed_first_calls: Annotated[int, Range(at_least=0, at_most=1_000_000)] = 8
    """Stop the run if this many first calls of a user's tool or reward function all fail; 0 never
    stops."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.agent.get("_target_") == "":  # an override can empty the block of a preset only so
            self.agent = {}
        self.branching = parse_choice(self.branching, Branching, "rollout.branching")
        check_range(
            not self.branch.entropy_estimate_top_k or self.temperature == 1,
            "rollout.branch.entropy_estimate_top_k",
            self.branch.entropy_estimate_top_k,
            f"0 with rollout.temperature={self.temperature}: engines list log-probs at 1 only",
        )
        limit_s = self.trajectory_timeout_s
        check_range(
            not (limit_s and self.partial_rollout),
            "rollout.trajectory_timeout_s",
            limit_s,
            "0 with rollout.partial_rollout, whose groups pause while the policy is updated",
        )

    @property
    def source_of_contexts(self) -> str:
        """Setting by which a trajectory may have several contexts; empty if it has one."""
        if self.agent:
            return "rollout.agent"
        return "rollout.use_inference_chat_template" if self.use_inference_chat_template else ""

    @property
    def has_user_branching(self) -> bool:
        """Whether the branching rule is a user class."""
        return is_user_code(self.branching)
