"""The configuration schema: type, default and meaning of every setting of a run.

Yaml files only set values; the defaults are here. The type of a setting declares its range, which
`config.ranges` checks when the section is built (by `OmegaConf.to_object`). Conditions on several
settings of a section are in its `__post_init__`, those across sections in `config.checks`.
Imports no torch, so that a login node can validate a configuration. Units are in the names: `_s`
seconds, `_mib` mebibytes, `_gib` gibibytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mega_agentrl.config.enums import OldLogProbs, RouterReplay
from mega_agentrl.config.ranges import MAX_STEPS, MAX_TEXT_CHARS, Length, Range, Section
from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.config.sections.policy import (
    BatchConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    SftConfig,
)
from mega_agentrl.config.sections.reward import RewardConfig
from mega_agentrl.config.sections.rollout import RolloutConfig
from mega_agentrl.config.sections.runtime import (
    ClusterConfig,
    EngineConfig,
    EvaluateConfig,
    ReportConfig,
    WeightSyncConfig,
)
from mega_agentrl.config.sections.tools import ToolConfig


@dataclass
class TrainConfig(Section):
    """The whole run.

    Without `total_steps`, `total_epochs` and `sft.max_steps` the run is one evaluation of the
    initial weights.
    """

    run_dir: Annotated[str, Length(at_least=1, at_most=MAX_TEXT_CHARS)] = "runs/default"
    """Folder of the run's files."""
    seed: Annotated[int, Range(at_least=0, at_most=2**31 - 1)] = 1
    """Seed of all random streams."""
    total_steps: Annotated[int, Range(at_least=0, at_most=MAX_STEPS, unit="steps")] = 100
    """Number of RL steps."""
    total_epochs: Annotated[int, Range(at_least=0, at_most=MAX_STEPS, unit="epochs")] = 0
    """Passes over the training data; above 0 it replaces `total_steps`."""
    save_every_steps: Annotated[int, Range(at_least=0, at_most=MAX_STEPS, unit="steps")] = 20
    """RL steps between checkpoints; 0 saves only at the end and on a signal."""
    resume: bool = True
    """Continue an unfinished run with the same settings in `run_dir`; false moves it aside and
    starts anew."""
    deterministic: bool = False
    """Make two runs give the same numbers, bit for bit on a CPU: engines process one request at a
    time without prefix cache, everything runs on one thread. Slow; for tests."""
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tool: ToolConfig = field(default_factory=ToolConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    @property
    def replays_sampled_routes(self) -> bool:
        """Whether training asks the engines for the experts of each token, if the model has any."""
        return self.model.router_replay is RouterReplay.sampled and not self.is_eval_only

    @property
    def takes_turns(self) -> bool:
        """Whether policy and engines never compute at the same time."""
        return self.rollout.max_staleness == 0

    @property
    def auxiliary_models(self) -> tuple[str, ...]:
        """Names of the models besides the policy, which have its parallel layout."""
        is_used_by_name = {
            "reward model": self.reward.hosts_reward_model,
            "critic": self.algo.needs_critic and not self.is_eval_only,
        }
        return tuple(name for name, is_used in is_used_by_name.items() if is_used)

    @property
    def has_scoring_pass(self) -> bool:
        """Whether the policy scores a batch before its update.

        Without that pass, the log-probs and entropies of a batch are those of the update itself,
        before its first optimizer step.
        """
        is_needed_by_loss = (
            self.optim.num_minibatches > 1 and self.algo.old_log_probs is OldLogProbs.policy
        )
        return (
            is_needed_by_loss
            or self.algo.reads_scores
            or self.algo.needs_critic
            or self.model.zero_mismatch
            or self.model.router_replay is RouterReplay.old
        )

    @property
    def is_eval_only(self) -> bool:
        """Whether the run only evaluates the initial weights and trains nothing."""
        return not (self.total_steps or self.total_epochs or self.sft.max_steps)
