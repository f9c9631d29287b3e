"""The vision tower of a vision-language model, and its place in Megatron's decoder.

megatron-core has no towers of these families, so the first chunk of the model holds transformers'
own, replicated on the tensor ranks of the first pipeline stage. Its features replace the embeddings
of the placeholder tokens; with DeepStack further features are added to the hidden states after the
first decoder layers.

A rank encodes only the images whose placeholders are among the tokens that pass through its layers:
all tokens of its context rank, or under sequence parallelism its part of them. Its gradients of the
tower are then complete, or are partial sums, which Megatron adds up over the tensor ranks
(`gpt_model.set_grad_sync_flags`).

Patches attend to those of their image, in most blocks of Qwen2.5-VL to those of their window.
transformers computes one image or window after the other, of which a micro-batch has thousands;
here those with the same number of patches are computed together (`attend_by_length`).

Shape suffixes: S tokens that pass through the layers of this rank, P placeholders among them, F
features of all images, D hidden width, K layers after which features are added.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import functional

from mega_agentrl.actor import device
from mega_agentrl.reshard.mapping.vision_shape import VisionTower

if TYPE_CHECKING:
    from mega_agentrl.actor.training.packing import MicroBatchImages
    from mega_agentrl.reshard.mapping.vision_shape import VisionShape
    from mega_agentrl.vision.processor import ImageProcessor


_ATTENTION = "flash_by_length"
"""Name of `attend_by_length` in transformers, which hands whole packed sequences, with their
cumulative lengths, to functions with `flash` in their name only."""


class DeepStackLayer(TransformerLayer):
    """Decoder layer after which features of images are added to the hidden states.

    They arrive as Megatron's `context`, `[K, P, D]`, which also passes through recomputation as an
    argument; layer k, counted from 0 in the model, adds features[k].
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output with the features added, and the features of later layers."""
        hidden_S1D, feature_KPD = super().forward(*args, **kwargs)
        if feature_KPD is None:
            return hidden_S1D, None
        index = self.layer_number - 1
        place_P = kwargs["packed_seq_params"].image_place_P
        hidden_S1D = hidden_S1D.index_add(0, place_P, feature_KPD[index].unsqueeze(1))
        return hidden_S1D, feature_KPD if index + 1 < len(feature_KPD) else None


def build_vision_tower(
    vision: VisionShape, dtype: torch.dtype, *, recompute: bool = False
) -> torch.nn.Module:
    """Build transformers' tower on this rank's device, with uninitialised weights.

    Args:
        vision: Sizes of the tower.
        dtype: Dtype of the weights; the rotary frequencies stay float32.
        recompute: Compute the blocks again in the backward pass.
    """
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, attend_by_length)
    model_class, config = _transformers_class(vision), _transformers_config(vision)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device.current_device()), no_init_weights():
            tower: torch.nn.Module = model_class(config)
    finally:
        torch.set_default_dtype(default_dtype)
    # Set afterwards, because transformers would look for the package flash-attn.
    config._attn_implementation = _ATTENTION
    if device.has_cuda():
        tower.patch_embed.forward = partial(embed_patches, tower.patch_embed.proj)
    if recompute:
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    return tower.train()


def embed_patches(projection: torch.nn.Conv3d, patch_PE: torch.Tensor) -> torch.Tensor:
    """Return `[P, h]` embeddings of `[P, E]` flattened patches, as a matrix product.

    A convolution whose kernel is as large as its input is one. cuDNN's convolution takes much more
    time and memory in bfloat16 (pytorch#166643). vLLM makes the same choice, on GPUs only.
    """
    weight = projection.weight
    return functional.linear(patch_PE.to(weight.dtype), weight.flatten(1), projection.bias)


def encode_images(
    tower: torch.nn.Module, processor: ImageProcessor, images: MicroBatchImages
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the features of each placeholder.

    Args:
        tower: The vision tower.
        processor: Cuts the images into patches.
        images: The images and the placeholders.

    Returns:
        `[P, D]` features in place of the embeddings, and `[K, P, D]` features that are added after
        the first layers, or None.
    """
    target = device.current_device()
    patches = np.concatenate([processor.patches(image) for image in images.images])
    grids = torch.tensor([image.grid_thw for image in images.images], device=target)
    patches_PE = device.from_host(torch.from_numpy(patches), target)
    output = tower(patches_PE, grid_thw=grids)
    feature_PD = output.pooler_output.index_select(0, images.feature_P)
    deepstack = getattr(output, "deepstack_features", None)
    if not deepstack:
        return feature_PD, None
    return feature_PD, torch.stack(deepstack).index_select(1, images.feature_P)


def attend_by_length(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within segments of patches, one call for all segments of a length.

    Args:
        module: The calling module of transformers.
        query: `[1, H, P, D]`, like `key` and `value`.
        key: See `query`.
        value: See `query`.
        attention_mask: Always None.
        scaling: Factor of the scores.
        cu_seq_lens_q: `[N + 1]` first patch of each segment, and P.

    Returns:
        `[1, P, H, D]`, and None for the weights.
    """
    length_N = cu_seq_lens_q.diff()
    parts = torch.cat([query, key, value])
    outputs, indices = [], []
    for length in sorted(set(length_N.tolist())):
        start_N = cu_seq_lens_q[:-1][length_N == length]
        index = start_N[:, None] + torch.arange(length, device=start_N.device)
        # [3, H, N, L, D] -> [3, N, H, L, D]
        selected = parts.index_select(2, index.flatten()).unflatten(2, index.shape).transpose(1, 2)
        out = functional.scaled_dot_product_attention(*selected, scale=scaling)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        indices.append(index.flatten())
    order_P = torch.cat(indices).argsort()
    return torch.cat(outputs).index_select(0, order_P)[None], None


def _transformers_class(vision: VisionShape) -> Any:
    if vision.tower is VisionTower.qwen2_5_vl:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        return Qwen2_5_VisionTransformerPretrainedModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    return Qwen3VLVisionModel


def _transformers_config(vision: VisionShape) -> Any:
    sizes: dict[str, Any] = {
        "depth": vision.depth,
        "hidden_size": vision.hidden_size,
        "num_heads": vision.num_heads,
        "intermediate_size": vision.ffn_hidden_size,
        "in_channels": vision.in_channels,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.merge_size,
        "out_hidden_size": vision.out_hidden_size,
        "attn_implementation": "sdpa",
    }
    if vision.tower is VisionTower.qwen2_5_vl:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

        return Qwen2_5_VLVisionConfig(
            **sizes,
            window_size=vision.window_size,
            fullatt_block_indexes=list(vision.full_attention_blocks),
        )
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    return Qwen3VLVisionConfig(
        **sizes,
        num_position_embeddings=vision.num_position_embeddings,
        deepstack_visual_indexes=list(vision.deepstack_blocks),
    )
