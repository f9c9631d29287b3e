"""The components of a run, which `runtime.build` creates and `train` uses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mega_agentrl.types.monitoring import Monitors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.protocols import (
        Critic,
        Generator,
        ImageLoader,
        InteractionProvider,
        Policy,
        PromptSource,
        RewardModel,
        Rubric,
        TextCodec,
        ToolProvider,
    )
    from mega_agentrl.types.records import Prompt

ResultT = TypeVar("ResultT")


@dataclass(slots=True, kw_only=True)
class Components:
    """Everything that the training loop works with, typed by protocol."""

    run_dir: Path
    policy: Policy
    """The trained model."""
    generator: Generator
    """The rollout engines."""
    tools: ToolProvider
    """Factory of tool sessions."""
    codec: TextCodec
    """Tokenizer, and chat template where the policy has one."""
    rubric: Rubric
    """Reward of finished trajectories."""
    prompt_source: PromptSource
    """Stream of training prompts."""
    validation_prompts: Sequence[Prompt]
    """Held-out prompts of the evaluations."""
    dev_prompts: Sequence[Prompt]
    """Prompts whose success rate decides when the warm start ends."""
    make_demonstration_batches: Callable[[], Callable[[int], TrainBatch]] | None
    """Opens the stream of warm-start examples at its beginning; the returned function gives the
    next batch of a given size. None without a warm start."""
    startup_s: float
    """Seconds spent reading inputs and starting processes."""
    run_coroutine: Callable[[Coroutine[Any, Any, ResultT]], ResultT]
    """Runs a coroutine to completion on the driver's event loop. With `rollout.max_staleness` the
    loop has its own thread, and tasks that the coroutine started keep running after it returns."""
    interactions: InteractionProvider | None = None
    """Simulated users, or None."""
    reward_model: RewardModel | None = None
    """Reward model hosted beside the policy, for the rubric part `model`, or None."""
    critic: Critic | None = None
    """Critic, if the advantage estimator needs one, or None."""
    cot_marker_ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Token ids that open and close the chain of thought, or None if nothing reads them."""
    agents: Any = None
    """The user's agent and its gateway (`rollout.agents.host.AgentHost`), or None."""
    images: ImageLoader | None = None
    """Loads images for a vision-language model; None for a model of text."""
    trigger_ids: frozenset[int] | None = None
    """Tokens after which ARES counts entropy windows; None means every token."""
    monitors: Monitors = field(default_factory=Monitors)
    """Trackers, GPU and memory monitors."""
