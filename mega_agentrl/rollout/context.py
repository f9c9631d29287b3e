"""The shared context of a rollout pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import Branching
from mega_agentrl.rollout.branching.policy import NoBranching, make_branch_policy
from mega_agentrl.rollout.clock import SamplingSpeed
from mega_agentrl.rollout.io.nodes import format_path

if TYPE_CHECKING:
    from mega_agentrl.config.sections.rollout import RolloutConfig
    from mega_agentrl.rollout.agents.host import AgentHost
    from mega_agentrl.rollout.branching.policy import BranchPolicy
    from mega_agentrl.rollout.io.tree_store import TreeStore
    from mega_agentrl.rollout.tracing import RolloutSpans
    from mega_agentrl.types.protocols import (
        Generator,
        ImageLoader,
        InteractionProvider,
        TextCodec,
        ToolProvider,
    )
    from mega_agentrl.types.records import Prompt

INFRA_ERRORS = (RuntimeError, OSError)
"""Exceptions of engines and tools that are not the policy's fault (see `types.protocols`)."""


@dataclass(slots=True, kw_only=True, frozen=True)
class RolloutContext:
    """Everything that the trajectories of one rollout pass share."""

    generator: Generator
    tools: ToolProvider
    codec: TextCodec
    """Must be a `ChatCodec` if tools are called by JSON or a user is simulated."""
    policy: BranchPolicy
    config: RolloutConfig
    temperature: float
    """Sampling temperature; 0 is greedy."""
    max_model_len: int
    """Maximum tokens of prompt plus response."""
    seed: int
    step: int | str
    """Name of the pass, such as a training step or an evaluation; part of every request seed."""
    interactions: InteractionProvider | None = None
    """Simulated users and environments."""
    spans: RolloutSpans | None = None
    """Recorder of OpenTelemetry spans; None disables tracing."""
    with_greedy: bool = False
    """Whether each group gets a greedy trajectory in addition (see `groups.group`)."""
    with_routes: bool = False
    """Whether to ask the engine for the experts of each token (`types.routes`)."""
    emitted_warnings: set[str] = field(default_factory=set)
    """Keys of warnings that were already logged in this pass."""
    tree_store: TreeStore | None = None
    """Store of finished trees, from which a restarted run restores them."""
    max_version_lag: int = 0
    """Maximum lag of tokens of a restored tree behind the engine, in weight versions."""
    images: ImageLoader | None = None
    """Loads images and checks those of tools; None for a model of text."""
    agents: AgentHost | None = None
    """The user's agent; None samples with the native loop."""
    sampling_speed: SamplingSpeed = field(default_factory=SamplingSpeed)
    """How fast the engines sample in this pass, which clocks of trajectories compare."""

    @property
    def is_lockstep(self) -> bool:
        """Whether prompts advance in lock-step (`rollout.branching=released`)."""
        return self.config.branching is Branching.released and self.temperature > 0

    def trajectory_id(self, prompt_key: str, path: tuple[int, ...]) -> str:
        """Return the id of a trajectory, unique within the run."""
        return f"{prompt_key}/{self.step}/{format_path(path)}"

    def max_response_tokens(self, prompt: Prompt) -> int:
        """Return how many tokens a response to the prompt may have."""
        return min(self.config.max_response_tokens, self.max_model_len - len(prompt.token_ids))


def make_rollout_context(
    *,
    generator: Generator,
    tools: ToolProvider,
    codec: TextCodec,
    config: RolloutConfig,
    max_model_len: int,
    seed: int,
    step: int | str,
    temperature: float | None = None,
    interactions: InteractionProvider | None = None,
    spans: RolloutSpans | None = None,
    with_greedy: bool = False,
    with_routes: bool = False,
    tree_store: TreeStore | None = None,
    images: ImageLoader | None = None,
    agents: AgentHost | None = None,
) -> RolloutContext:
    """Build the context of one pass from the configuration (see the fields of `RolloutContext`).

    `temperature` None selects the configured one. Greedy sampling never branches.
    """
    temperature = config.temperature if temperature is None else temperature
    return RolloutContext(
        generator=generator,
        tools=tools,
        codec=codec,
        policy=NoBranching() if temperature == 0 else make_branch_policy(config),
        config=config,
        temperature=temperature,
        max_model_len=max_model_len,
        seed=seed,
        step=step,
        interactions=interactions,
        spans=spans,
        with_greedy=with_greedy,
        with_routes=with_routes,
        tree_store=tree_store,
        images=images,
        agents=agents,
    )
