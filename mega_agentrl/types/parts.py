"""The parts of a run, as `runtime.build` hands them to `train.loop`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mega_agentrl.types.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.ports import (
        Critic,
        Generator,
        Interactions,
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
class Parts:
    """Everything the loop works with; it knows none of the concrete classes.

    start_s: seconds it took to read the input and start every process.
    wait: runs a coroutine to its end on the driver's one event loop. With `rollout.staleness` that
    has a thread of its own, and what the coroutine started goes on behind its end.
    demonstrations: opens the warm start's stream at its beginning, which gives the next batch of a
    given size; None without one.
    dev: questions whose sampled success ends the warm start.
    interactions: simulated users of the prompts; None without any.
    critic: of algo.advantage=gae; None without it.
    reward_model: judge of whole batches, for the rubric's part `model`; None without one.
    cot_markers: token ids that open and close the chain of thought; None where nobody asks.
    trigger_ids: tokens behind which ARES counts windows; None for every token.
    watch: what looks at the run.
    """

    run_dir: Path
    policy: Policy
    generator: Generator
    tools: ToolProvider
    codec: TextCodec
    rubric: Rubric
    prompts: PromptSource
    validation: Sequence[Prompt]
    dev: Sequence[Prompt]
    demonstrations: Callable[[], Callable[[int], TrainBatch]] | None
    start_s: float
    wait: Callable[[Coroutine[Any, Any, ResultT]], ResultT]
    interactions: Interactions | None = None
    reward_model: RewardModel | None = None
    critic: Critic | None = None
    cot_markers: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    trigger_ids: frozenset[int] | None = None
    watch: Watch = field(default_factory=Watch)
