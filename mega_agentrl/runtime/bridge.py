"""The way of the weights from the policy ranks into the engines.

`connect` makes one plan from what every policy rank holds and lets all ranks of both sides
meet once; `send` moves a version: engines pause, ranks send their own shards straight to the
engine workers, engines verify, load and serve again. The driver carries no weights.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from mega_agentrl.reshard.model_shape import ModelShape
from mega_agentrl.reshard.names import hf_shapes
from mega_agentrl.reshard.plan import TransferPlan, make_plan
from mega_agentrl.reshard.transport import WeightLink
from mega_agentrl.runtime.remote import gather

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.runtime.generator_group import GeneratorGroup
    from mega_agentrl.runtime.policy_group import PolicyGroup
    from mega_agentrl.types.ports import Generator


class WeightBridge:
    """Between one policy and its engines."""

    def __init__(
        self, policy: PolicyGroup, engines: GeneratorGroup, config: TrainConfig, *, dtype: str
    ) -> None:
        self._policy = policy
        self._engines = engines
        self._config = config
        self._dtype = dtype
        self._plan: TransferPlan | None = None

    def connect(self) -> None:
        """Plan the transfer and let every rank join the transport group."""
        layouts = self._policy.call_all("layout")
        shapes = hf_shapes(ModelShape.from_folder(self._config.model.path))
        plan = make_plan(layouts, shapes, self._dtype, self._engines.num_ranks)
        deadline_s = self._config.cluster.actor_deadline_s
        address, port = self._policy.open_store(deadline_s)
        link = WeightLink(address, port, plan, deadline_s)
        first_sinks = range(0, self._engines.num_ranks, self._config.engine.tensor)
        joins = self._policy.start_join(link)
        joins |= self._engines.start_connect(
            [replace(link, first_sink=first_sink) for first_sink in first_sinks]
        )
        gather(joins, "meeting for the weight transfer", deadline_s)
        self._plan = plan

    def send(self, generator: Generator, version: int) -> Mapping[str, float]:
        """Bring the policy's current weights into every engine.

        Returns `bytes` received per engine worker and `seconds` from pause to serving.
        Raises `RemoteError` naming rank, tensor and bucket; the engines then refuse to serve.
        """
        assert self._plan is not None, "connect() comes before the first send"
        if generator is not self._engines:
            raise ValueError("send_weights: expected the generator this policy is attached to")
        start_s = time.perf_counter()
        calls = self._engines.start_call("receive_weights", version)
        calls |= self._policy.start_send(version)
        gather(
            calls, f"transfer of weight version {version}", self._config.cluster.actor_deadline_s
        )
        self._engines.set_version(version)
        return {
            "bytes_per_worker": float(sum(self._plan.sent_bytes().values())),
            "seconds": time.perf_counter() - start_s,
        }
