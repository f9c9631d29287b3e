"""Core attention over packed trees, for Megatron layers without Transformer Engine.

The packed tokens pass through the layers as one sequence of batch size 1 (`sbhd`), so that norms,
linear layers and rotary embedding process each token once and no padding. Only the core attention
knows the trees (`attention_plan`):

    GPU, 16-bit  `tree_attention`, which gathers no keys along paths, for heads of 64 or 128; else
                 torch's variable-length flash attention, without padding, before torch 2.12 with
                 key and value heads repeated
    otherwise    torch's scaled-dot-product attention over blocks of branches of similar length

With context parallelism the keys and values of all context ranks are gathered first. Keys and
values that are gathered along the paths of a tree are as many as in flat rows, so they are not kept
for the backward pass but gathered again.

Shape suffixes: S tokens of this rank, W of all context ranks, K key slots of a plan, G trees, H and
Hkv local heads, D head width.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from mega_agentrl.actor.model.attention_plan import (
    BlockSparseAttentionPlan,
    Branch,
    PaddedAttentionPlan,
    VarlenAttentionPlan,
    cumulative_lengths,
    make_block_sparse_plan,
    make_padded_plan,
    make_varlen_plan,
)
from mega_agentrl.actor.model.exact_layers import exact_attention
from mega_agentrl.actor.parallel.context_parallel import all_gather_tokens
from mega_agentrl.config.checks.parallel import TRITON_HEAD_DIMS
from mega_agentrl.config.enums import TreeAttention
from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mega_agentrl.actor.model.route_replay import RouteLog
    from mega_agentrl.actor.training.packing import MicroBatch


@dataclass
class PackedTreeParams(PackedSeqParams):
    """The trees of a packed micro-batch, in the form Megatron passes to the attention.

    Megatron's own fields hold the boundaries of the trees for Transformer Engine, which splits
    sequences over context ranks in the same way; they are right for trees of a single row only.
    They count padding at the end of a tree as part of it, so that kernels without support for gaps
    can be used; no real token attends to it.
    """

    position_S: torch.Tensor = None
    """`[S]` int64 position of each token on its path."""
    rotary_position_3S: torch.Tensor | None = None
    """`[3, S]` int64 position along time, height and width; None for a text model."""
    image_place_P: torch.Tensor | None = None
    """`[P]` int64 index of each placeholder of an image among the tokens that pass through this
    rank's layers; set only where features are added to their hidden states (DeepStack)."""
    start_G: tuple[int, ...] = ()
    """`[G + 1]` first token of each tree in the packed tokens of all context ranks, and W."""
    branches: tuple[Branch, ...] = ()
    """All branches in order."""
    route_log: RouteLog | None = None
    """Routes of the tokens, for layers with experts."""
    context_rank: int = 0
    context_size: int = 1
    _biases_by_dtype: dict[torch.dtype, list[torch.Tensor | None]] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def from_micro_batch(cls, micro: MicroBatch) -> PackedTreeParams:
        """Create the parameters of a micro-batch."""
        start_G, position_S = micro.start_G, micro.position_S
        assert start_G[-1] == len(position_S) * micro.context_size, "trees and tokens differ"
        lengths = [stop - start for start, stop in pairwise(start_G)]
        tree_bounds = cumulative_lengths(lengths, position_S.device)
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=tree_bounds,
            cu_seqlens_kv=tree_bounds,
            cu_seqlens_q_padded=tree_bounds,
            cu_seqlens_kv_padded=tree_bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            position_S=position_S,
            rotary_position_3S=getattr(micro, "rotary_position_3S", None),
            start_G=start_G,
            branches=micro.branches,
            route_log=getattr(micro, "route_log", None),
            context_rank=micro.context_rank,
            context_size=micro.context_size,
        )

    @property
    def has_forks(self) -> bool:
        """Whether any tree has more than one branch."""
        return len(self.branches) >= len(self.start_G)

    @cached_property
    def padded_plan(self) -> PaddedAttentionPlan:
        """The padded plan, built on first use on the device of the positions."""
        return make_padded_plan(
            self.start_G,
            self.branches,
            self.context_rank,
            self.context_size,
            self.position_S.device,
        )

    def padded_biases(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Return the bias of each block of the padded plan, built on first use.

        From a boolean mask torch would make a bias in every layer, and keep each for the backward
        pass.
        """
        if dtype not in self._biases_by_dtype:
            self._biases_by_dtype[dtype] = [block.bias(dtype) for block in self.padded_plan.blocks]
        return self._biases_by_dtype[dtype]

    @cached_property
    def varlen_plan(self) -> VarlenAttentionPlan:
        """The varlen plan, built on first use on the device of the positions."""
        return make_varlen_plan(
            self.start_G,
            self.branches,
            self.context_rank,
            self.context_size,
            self.position_S.device,
        )

    @cached_property
    def block_sparse_plan(self) -> BlockSparseAttentionPlan:
        """The block-sparse plan, built on first use on the device of the positions."""
        return make_block_sparse_plan(
            self.start_G,
            self.branches,
            self.context_rank,
            self.context_size,
            self.position_S.device,
        )


class PackedAttention(MegatronModule):
    """Core attention of Megatron's `SelfAttention`, in place of `DotProductAttention`."""

    block_attention: Callable[..., torch.Tensor] | None = None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.tree_attention: TreeAttention = config.tree_attention
        self.context_group = pg_collection.cp if pg_collection is not None else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedTreeParams | None = None,
    ) -> torch.Tensor:
        """Map `[S, 1, H, D]` query and `[S, 1, Hkv, D]` key and value to `[S, 1, H * D]`."""
        assert packed_seq_params is not None, "every micro-batch is packed"
        return packed_attention(
            query,
            key,
            value,
            packed_seq_params,
            self.softmax_scale,
            context_group=self.context_group,
            tree_attention=self.tree_attention,
            block_attention=self.block_attention,
        )


class ExactPackedAttention(PackedAttention):
    """`PackedAttention` with the value of `numerics`."""

    block_attention = staticmethod(exact_attention)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    trees: PackedTreeParams,
    scale: float | None = None,
    *,
    context_group: dist.ProcessGroup | None = None,
    tree_attention: TreeAttention = TreeAttention.gather,
    block_attention: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute causal attention along the paths of each tree.

    Args:
        query: `[S, 1, H, D]`.
        key: `[S, 1, Hkv, D]`.
        value: `[S, 1, Hkv, D]`.
        trees: The trees of the micro-batch.
        scale: Factor of the scores, 1 / sqrt(D) by default.
        context_group: The context-parallel group; required if `trees.context_size` is above 1.
        tree_attention: The kernel; not auto.
        block_attention: Kernel for padded blocks that is used instead; its arguments are those of
            torch's `scaled_dot_product_attention`.

    Returns:
        `[S, 1, H * D]`.
    """
    query_SHD, key_WHD, value_WHD = (tensor.squeeze(1) for tensor in (query, key, value))
    if trees.context_size > 1:
        assert context_group is not None, "trees are cut over context ranks"
        key_value = all_gather_tokens(torch.cat([key_WHD, value_WHD], dim=1), context_group)
        key_WHD, value_WHD = key_value.chunk(2, dim=1)
    compute: Callable[..., torch.Tensor]
    if block_attention is not None:
        compute = partial(_padded_attention, block_attention=block_attention)
    elif tree_attention is TreeAttention.triton:
        compute = _triton_attention
    elif supports_varlen_attention(query.device, query.dtype, query.size(-1)):
        compute = _varlen_attention
    else:
        compute = _padded_attention
    return compute(query_SHD, key_WHD, value_WHD, trees, scale).reshape(query.size(0), 1, -1)


def supports_varlen_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch's variable-length attention can be used."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def resolve_tree_attention(
    choice: TreeAttention, device: torch.device, dtype: torch.dtype, head_dim: int
) -> TreeAttention:
    """Return the kernel that a choice stands for on this device: gather or triton.

    For the policy, `config.checks.parallel.check_tree_attention` has checked what needs no GPU.

    Raises:
        ConfigError: If the choice is triton and the model cannot be computed with it.
    """
    if choice is TreeAttention.gather:
        return choice
    expected = cause = ""
    if head_dim not in TRITON_HEAD_DIMS:
        sizes = " or ".join(map(str, TRITON_HEAD_DIMS))
        expected = f"gather for a model with heads of {head_dim}, triton for heads of {sizes}"
        cause = "a setting chosen for another model"
    elif dtype not in (torch.bfloat16, torch.float16):
        expected = f"gather in {dtype}, triton with model.dtype=bfloat16"
        cause = "a comparison in float32 with the settings of a training run"
    elif device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        expected = "gather on this machine, triton on GPUs of compute capability 8.0 or higher"
        cause = "the settings of another machine, or torch does not see the GPU"
    elif find_spec("triton") is None:
        expected = "gather without the package triton"
        cause = "an environment that was made for CPUs (`make env DEVICE=gpu`)"
    if not expected:
        return TreeAttention.triton
    if choice is TreeAttention.auto:
        return TreeAttention.gather
    raise ConfigError("model.tree_attention", str(choice), expected, cause)


def _triton_attention(
    query_SHD: torch.Tensor,
    key_WHD: torch.Tensor,
    value_WHD: torch.Tensor,
    trees: PackedTreeParams,
    scale: float | None,
) -> torch.Tensor:
    # Imported here because triton is not installed on machines without a GPU.
    from mega_agentrl.actor.model.tree_attention import tree_attention

    return tree_attention(query_SHD, key_WHD, value_WHD, trees, scale)


def _varlen_attention(
    query_SHD: torch.Tensor,
    key_WHD: torch.Tensor,
    value_WHD: torch.Tensor,
    trees: PackedTreeParams,
    scale: float | None,
) -> torch.Tensor:
    plan = trees.varlen_plan
    grouped_queries, num_heads = {}, query_SHD.size(1)
    if _accepts_grouped_queries(varlen_attn):
        grouped_queries["enable_gqa"] = num_heads != key_WHD.size(1)
        num_heads = key_WHD.size(1)
    with _gather_again_in_backward(trees.has_forks) as gather:
        return varlen_attn(
            query_SHD,
            gather(key_WHD, plan.key_index_K, num_heads),
            gather(value_WHD, plan.key_index_K, num_heads),
            plan.cu_seqlens_q,
            plan.cu_seqlens_k,
            plan.max_seqlen_q,
            plan.max_seqlen_k,
            scale=scale,
            # Causal: the last query of a segment is aligned with its last key.
            window_size=(-1, 0),
            **grouped_queries,
        )


@cache
def _accepts_grouped_queries(function: Callable[..., torch.Tensor]) -> bool:
    """Return whether `varlen_attn` has the argument `enable_gqa`, which it got in torch 2.12."""
    return "enable_gqa" in inspect.signature(function).parameters


def _padded_attention(
    query_SHD: torch.Tensor,
    key_WHD: torch.Tensor,
    value_WHD: torch.Tensor,
    trees: PackedTreeParams,
    scale: float | None,
    block_attention: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention,
) -> torch.Tensor:
    plan = trees.padded_plan
    # The only fused GPU kernel for float32 needs as many key heads as query heads.
    num_heads = query_SHD.size(1) if query_SHD.is_cuda else key_WHD.size(1)
    query_sizes = [block.num_segments * block.num_queries for block in plan.blocks]
    key_sizes = [block.num_segments * block.num_keys for block in plan.blocks]
    block_inputs = zip(
        plan.blocks,
        trees.padded_biases(query_SHD.dtype),
        query_SHD.index_select(0, plan.query_index_P).split(query_sizes),
        plan.key_index_K.split(key_sizes),
        strict=True,
    )
    outputs = []
    for block, bias, query, key_index in block_inputs:
        with _gather_again_in_backward(trees.has_forks) as gather:
            key, value = (gather(tensor, key_index, num_heads) for tensor in (key_WHD, value_WHD))
            batch = (
                tensor.unflatten(0, (block.num_segments, -1)) for tensor in (query, key, value)
            )
            out = block_attention(
                *(tensor.transpose(1, 2) for tensor in batch),
                attn_mask=bias,
                is_causal=bias is None,
                scale=scale,
                enable_gqa=query.size(1) != key.size(1),
            )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.slot_index_S)


@contextmanager
def _gather_again_in_backward(
    enabled: bool,
) -> Iterator[Callable[[torch.Tensor, torch.Tensor | None, int], torch.Tensor]]:
    """Yield a function that gathers keys or values, and let autograd save no gathered tensors.

    Operations inside the context that would save a gathered tensor for their backward pass save how
    to gather it again. The function takes `[W, Hkv, D]` keys or values, the `[K]` index of each key
    slot or None for all in order, and the number of heads that the heads are repeated to; it
    returns `[K, heads, D]`.

    Args:
        enabled: False to let the operations save gathered tensors, which takes less time.
    """
    regather_by_storage: dict[int, Callable[[], torch.Tensor]] = {}

    def gather(
        part_WHD: torch.Tensor, index_K: torch.Tensor | None, num_heads: int
    ) -> torch.Tensor:
        part_KHD = part_WHD if index_K is None else part_WHD.index_select(0, index_K)
        if num_heads != part_KHD.size(1):
            part_KHD = part_KHD.repeat_interleave(num_heads // part_KHD.size(1), dim=1)
        # Without gradients there is nothing to save: that is the backward pass, gathering again,
        # where a new entry would hold the keys or values until Python's next garbage collection.
        if enabled and torch.is_grad_enabled():
            regather = partial(gather_without_grad, part_WHD.detach(), index_K, num_heads)
            regather_by_storage[part_KHD.untyped_storage().data_ptr()] = regather
        return part_KHD

    @torch.no_grad()
    def gather_without_grad(*arguments: Any) -> torch.Tensor:
        return gather(*arguments)

    def pack(tensor: torch.Tensor) -> Any:
        regather = regather_by_storage.get(tensor.untyped_storage().data_ptr())
        if regather is None:
            return tensor
        return regather, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        regather, *view = saved
        return regather().as_strided(*view)

    if not enabled:
        yield gather
        return
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield gather
    regather_by_storage.clear()
