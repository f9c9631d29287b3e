"""The worker's side of a weight update: our backend among vLLM's weight-transfer engines.

Every worker of the engine joins the trainer's transport group as one sink, receives the blocks
straight from the trainer ranks that hold them, and hands complete Hugging Face tensors to vLLM's
own loader, which cuts them to the worker's tensor-parallel part. Loading goes through vLLM's
layerwise reload, because kernels may have repacked the weights (on a CPU the original parameter
is gone) and CUDA graphs need the memory to stay in place. A module that shares the parameters
of another (a tied output layer) gets no tensor of its own; what it has repacked for its kernel is
made again from the shared parameter, which vLLM's reload does not do.

State: ready -> `start_weight_update` -> updating -> `finish_weight_update` -> ready; any error
makes it failed until an update succeeds. In both other states a forward pass raises: the worker
itself never computes with half-written weights, whatever the engine asks of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from mega_agentrl.reshard.transport import ShardReceiver, WeightLink

if TYPE_CHECKING:
    import torch


@dataclass
class LinkInfo(WeightTransferInitInfo):
    """link: `WeightLink.to_plain`."""

    link: bytes


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    """version: weight version that is being sent."""

    version: int


class ReshardTransferEngine(WeightTransferEngine[LinkInfo, VersionInfo]):
    """One worker's receiver."""

    init_info_cls = LinkInfo
    update_info_cls = VersionInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiver: ShardReceiver | None = None
        self._unusable: str | None = None
        self._tied: dict[str, torch.nn.Module] = {}
        self.model.register_forward_pre_hook(self._refuse)

    def _refuse(self, module: torch.nn.Module, args: Any) -> None:
        if self._unusable is not None:
            raise RuntimeError(f"forward pass refused: {self._unusable}")

    def init_transfer_engine(self, init_info: LinkInfo) -> None:
        """Join the transport group; returns when all its ranks have joined."""
        self.shutdown()
        link = WeightLink.from_plain(init_info.link)
        self._receiver = ShardReceiver.join(link, sink=get_tensor_model_parallel_rank())

    def start_weight_update(self) -> None:
        """Make the parameters loadable again."""
        if self._receiver is None:
            raise RuntimeError("weight update before the transport group was joined")
        self._unusable = "a weight update has started and not finished"
        self._tied = tied_modules(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: VersionInfo) -> None:
        """Receive and load all tensors of one version."""
        assert self._receiver is not None
        try:
            self.model.load_weights(self._receiver.receive(update_info.version))
            self._check_all_loaded()
        except Exception as error:
            self._unusable = f"update to version {update_info.version} failed: {error}"
            self.shutdown()  # trainer ranks that are still sending fail at once
            # Back to whole modules, values undefined: the next update finds what it expects.
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        """Repack for the kernels and serve again."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self._tied.values():
            module.quant_method.process_weights_after_loading(module)
        self._unusable = None

    def _check_all_loaded(self) -> None:
        """vLLM itself keeps the old weights of a module that got none, with a warning."""
        for name, module in self.model.named_modules():
            if name in self._tied:
                continue
            info = get_layerwise_info(module)
            waits = info.can_load() and info.load_numel == 0 and _own_parameters(module)
            if waits and not is_deferred_attention_layer(module):
                raise ValueError(
                    f"module {name} got no weights; probable cause: the trainer's tensors are "
                    f"not those of {type(self.model).__name__}"
                )

    def shutdown(self) -> None:
        """Leave the transport group."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def tied_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules whose every parameter belongs to an earlier module, by name."""
    owned: set[int] = set()
    tied = {}
    for name, module in model.named_modules():
        ids = {id(parameter) for parameter in _own_parameters(module)}
        if ids and ids <= owned:
            tied[name] = module
        owned |= ids
    return tied


def _own_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]
