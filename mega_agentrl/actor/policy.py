"""One rank of the policy: score, update, supervise, keep a frozen reference.

Values in and out are plain or CPU tensors, so that a remote call can carry them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mega_agentrl.actor import checkpoint
from mega_agentrl.actor.heads import VocabHead
from mega_agentrl.actor.loss import (
    POLICY_METRICS,
    SUPERVISED_METRICS,
    PolicyObjective,
    SupervisedObjective,
)
from mega_agentrl.actor.model import vocab_shard
from mega_agentrl.actor.network import Network, Seat, summary
from mega_agentrl.actor.offload import EVERYTHING, require_on_device
from mega_agentrl.actor.profile import StepProfile
from mega_agentrl.actor.reference import Reference
from mega_agentrl.batch.minibatch import step_masks
from mega_agentrl.batch.probe import probe_batch
from mega_agentrl.estimate.measured import MIB, PROCESS
from mega_agentrl.reshard.model_shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set
    from contextlib import AbstractContextManager

    from mega_agentrl.config.algo_schema import AlgoConfig
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.reshard.layout import ShardLayout
    from mega_agentrl.types.batch import TrainBatch, UpdateStats


class PolicyRank:
    """One process's part of the policy; weights are undefined until `load`."""

    def __init__(self, config: TrainConfig, seat: Seat) -> None:
        self._config = config
        shape = ModelShape.from_folder(config.model.path)
        self.network = Network(config, shape, seat, trains=not config.validates_only)
        self._shard = vocab_shard(self.network.shape, self.network.groups)
        self._reference: Reference | None = None
        self._profile = StepProfile()

    def load(self, folder: str) -> None:
        """Read this rank's slices of a checkpoint of the same shape; moments start anew.

        Where the objective needs a reference, the loaded weights become it as well. Without
        training there is neither that nor an optimizer.
        """
        self.network.load(folder)
        if self._config.algo.needs_reference and self.network.trains:
            self.freeze_reference()

    def freeze_reference(self) -> None:
        """Keep a copy of the current weights, in host memory, as the reference of the KL term.

        Where `model.reference` names a model, that is the reference whatever the weights are.
        """
        given = self._config.model.reference
        if given and self._reference is not None:
            return
        if given:
            self._reference = Reference(self.network.parameters.values())
            with self._reference.in_place():
                self.network.read(given)
        elif self._reference is None:
            self._reference = Reference(self.network.parameters.values())
        else:
            self._reference.freeze()

    def set_objective(self, algo: AlgoConfig, temperature: float) -> None:
        """Go on with another objective; temperature: of sampling.

        Where it needs a reference, the weights as they are now become it, unless
        `model.reference` names another.
        """
        rollout = replace(self._config.rollout, temperature=temperature)
        self._config = replace(self._config, algo=algo, rollout=rollout)
        if algo.needs_reference:
            self.freeze_reference()
        else:
            self._reference = None

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments; the reference, where there is one, starts here too."""
        self.network.reset_optimizer()
        if self._reference is not None:
            self.freeze_reference()

    def logprobs(
        self, batch: TrainBatch, reference: bool = False
    ) -> tuple[list[int], torch.Tensor, torch.Tensor] | None:
        """Log-prob and entropy of every response token, at rollout.temperature.

        Returns the rows of this rank's data share and their [rows, T] float32 log-probs and
        entropies, 0 after a row's end; on one rank of the share's last stage, else None.
        """
        width = batch.response_BT.size(1)
        select_BT = torch.arange(width)[None, :] < batch.length_B[:, None]
        with self._reference_in_place() if reference else nullcontext():
            scored = self.network.score(batch, select_BT, self._head(width, self._temperature))
        if scored is None:
            return None
        rows, (logp_BT, entropy_BT) = scored
        return rows, logp_BT, entropy_BT

    def probe(self, token_ids: Sequence[int]) -> list[float] | None:
        """Log-probs of a prompt's tokens after the first, at temperature 1.

        On one rank of the last stage of the first data share, else None.
        """
        batch = probe_batch(token_ids, self.network.groups.position.data_size)
        width = batch.response_BT.size(1)
        select_BT = torch.ones_like(batch.mask_BT)
        scored = self.network.score(batch, select_BT, self._head(width, 1.0))
        if scored is None or self.network.groups.position.data_rank:
            return None
        _, (logp_BT, _) = scored
        logps: list[float] = logp_BT[0].tolist()
        return logps

    def update(
        self,
        batch: TrainBatch,
        kl_weight_BT: torch.Tensor | None = None,
        lr: float | None = None,
    ) -> UpdateStats:
        """optim.num_minibatches steps on the configured policy loss over the batch, in row order.

        kl_weight_BT: [B, T] weight of the KL term per token, instead of algo.kl_coef.
        """
        head = self._head(batch.response_BT.size(1), self._temperature)
        results = []
        for mask_BT in step_masks(batch.mask_BT, self._config.optim.num_minibatches):
            objective = PolicyObjective(self._config.algo, batch, mask_BT, kl_weight_BT)
            results.append(
                self.network.step(batch, mask_BT, head, objective, POLICY_METRICS, lr=lr)
            )
        return summary(results, POLICY_METRICS)

    def supervise(self, batch: TrainBatch, lr: float | None = None) -> UpdateStats:
        """One step on the mean negative log-prob of the masked tokens, at temperature 1.

        lr: sft.lr by default; the schedule of optim belongs to `update`.
        """
        mask_BT = batch.mask_BT.bool()
        result = self.network.step(
            batch,
            mask_BT,
            self._head(batch.response_BT.size(1), 1.0),
            SupervisedObjective(mask_BT),
            SUPERVISED_METRICS,
            lr=self._config.sft.lr if lr is None else lr,
        )
        return summary([result], SUPERVISED_METRICS)

    def layout(self) -> list[ShardLayout]:
        """Which rectangles of which Hugging Face tensors this rank holds."""
        return list(self.network.layout)

    def parameter(self, name: str) -> torch.Tensor:
        """The local tensor of a shard of `layout`, on its device; shares memory."""
        require_on_device("sending weights", {"weights"}, self.network.offload.on_host)
        return self.network.parameters[name].detach()

    def export(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder; configuration from the loaded one."""
        self.network.export(folder)

    def save(
        self, folder: str, extra: Mapping[str, Any] | None = None, keep: int | None = None
    ) -> str:
        """Write a checkpoint of the training state; see `actor.checkpoint.save`.

        The reference is not in it: it is made by `load`, `freeze_reference` or `set_objective`,
        as at the start.
        """
        timeout_s = self._config.cluster.call_deadline_s
        return str(
            checkpoint.save(self.network, folder, extra=extra, keep=keep, timeout_s=timeout_s)
        )

    def resume(self, folder: str) -> dict[str, Any]:
        """Take up a checkpoint, of any layout; returns what `save` was given as extra."""
        return checkpoint.load(self.network, folder)

    def to_host(
        self, *, weights: bool = True, gradients: bool = True, optimizer: bool = True
    ) -> None:
        """Give the device to someone else; what is away must come back before it is used."""
        self.network.offload.to_host(weights=weights, gradients=gradients, optimizer=optimizer)

    def to_device(
        self, *, weights: bool = True, gradients: bool = True, optimizer: bool = True
    ) -> None:
        """Bring parts back; the gradients come back empty."""
        self.network.offload.to_device(weights=weights, gradients=gradients, optimizer=optimizer)

    def occupy(self, parts: Set[str]) -> None:
        """Have these parts of `offload.EVERYTHING` on the device and the others in host memory."""
        offload = self.network.offload
        offload.to_host(**{name: name not in parts for name in EVERYTHING})
        offload.to_device(**{name: name in parts for name in EVERYTHING})

    def begin_profile(self) -> None:
        """Begin a trace of what this rank does."""
        self._profile.begin()

    def end_profile(self, file: str) -> None:
        """End it and write it as a chrome trace; raises `ValueError` without a beginning."""
        self._profile.end(Path(file))

    def gpu_name(self) -> str:
        """This rank's GPU as CUDA calls it; empty on a CPU."""
        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    def memory(self) -> dict[str, float]:
        """MiB that this rank has taken at most, on a CPU also its libraries, which are not in
        that; and tokens of its largest micro-batch of a training step.
        """
        figures = {"micro_batch_tokens": float(self.network.most_tokens)}
        if torch.cuda.is_available():
            return figures | {"peak_mib": torch.cuda.max_memory_reserved() / MIB}
        return figures | {"peak_mib": PROCESS.taken_mib(), "libraries_mib": PROCESS.libraries_mib()}

    def close(self) -> None:
        """Leave the process groups; safe to call twice."""
        self.network.close()

    @property
    def _temperature(self) -> float:
        return self._config.rollout.temperature

    def _head(self, num_positions: int, temperature: float) -> VocabHead:
        return VocabHead(temperature=temperature, shard=self._shard, num_positions=num_positions)

    def _reference_in_place(self) -> AbstractContextManager[None]:
        if self._reference is None:
            raise ValueError(
                "logprobs of the reference: there is none; expected algo.kl_coef above 0, "
                "algo.ares.mode other than off, or freeze_reference() before"
            )
        return self._reference.in_place()
