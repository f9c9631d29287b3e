"""Shape of a vision tower, read from `vision_config` of a checkpoint's `config.json`.

Needs neither torch nor transformers, like `model_shape`. The table of a tower's tensors is written
out here, because plans and estimates are made where there is no torch; the tower itself is that of
transformers (`actor.model.vision_tower`).

A tower turns an image's patches into features, one for `merge_size` x `merge_size` patches:

    Qwen2.5-VL  patches [P, C t p p] -> blocks with RMS norms and a gated MLP; most blocks attend
                within windows -> merger
    Qwen3-VL    the same with learned positions, layer norms and a plain MLP; the outputs of the
                `deepstack_blocks` go through mergers of their own, and are added to the decoder's
                hidden states after its layers 0, 1, ... (DeepStack, arXiv 2406.04334)

Hugging Face names of its tensors begin with `visual.` (Qwen2.5-VL) or `model.visual.` (Qwen3-VL).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mega_agentrl.errors import InputError


class VisionTower(StrEnum):
    """Architecture of a vision tower; the values are transformers' model types."""

    qwen2_5_vl = "qwen2_5_vl"
    qwen3_vl = "qwen3_vl"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Sizes of a vision tower; settings of the other architecture keep their neutral value."""

    tower: VisionTower
    depth: int
    """Number of blocks."""
    hidden_size: int
    num_heads: int
    ffn_hidden_size: int
    """Inner width of a block's MLP."""
    in_channels: int
    patch_size: int
    """Side of a patch in pixels."""
    temporal_patch_size: int
    """Frames of a patch."""
    merge_size: int
    """Patches along height and along width that are merged into one feature."""
    out_hidden_size: int
    """Width of a feature, which is that of the decoder."""
    window_size: int = 0
    """Side of the attention windows in pixels (Qwen2.5-VL)."""
    full_attention_blocks: tuple[int, ...] = ()
    """Blocks that attend to the whole image (Qwen2.5-VL)."""
    num_position_embeddings: int = 0
    """Rows of the learned positions (Qwen3-VL)."""
    deepstack_blocks: tuple[int, ...] = ()
    """Blocks whose features are added after the decoder's first layers, in order (Qwen3-VL)."""

    @property
    def patch_dim(self) -> int:
        """Number of values of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of the patches that are merged into one feature."""
        return self.hidden_size * self.merge_size**2

    @classmethod
    def from_config(
        cls, config: dict[str, Any], tower: VisionTower, decoder_hidden_size: int, path: str
    ) -> VisionShape:
        """Read the tower of a `config.json`.

        Args:
            config: Its `vision_config`.
            tower: The architecture.
            decoder_hidden_size: Hidden size of the decoder.
            path: Path of the file, for error messages.

        Raises:
            ValueError: For a missing key or an unsupported value.
        """
        is_qwen3 = tower is VisionTower.qwen3_vl
        activation = "gelu_pytorch_tanh" if is_qwen3 else "silu"
        rope = config.get("rope_parameters") or {}
        for key, got, expected in (
            ("hidden_act", config.get("hidden_act", activation), activation),
            ("out_hidden_size", _require(config, "out_hidden_size", path), decoder_hidden_size),
            ("in_channels", config.get("in_channels", config.get("in_chans", 3)), 3),
            ("rope_type", rope.get("rope_type", "axial"), "axial"),
            ("rope_theta", rope.get("rope_theta", 10000.0), 10000.0),
        ):
            if got != expected:
                name, cause = f"{path}, vision_config.{key}", "another model family"
                raise InputError(name, got, f"{expected!r}; others have no mapping", cause)
        sizes: dict[str, Any]
        if is_qwen3:
            sizes = {
                "num_position_embeddings": int(_require(config, "num_position_embeddings", path)),
                "deepstack_blocks": tuple(_require(config, "deepstack_visual_indexes", path)),
            }
        else:
            sizes = {
                "window_size": int(_require(config, "window_size", path)),
                "full_attention_blocks": tuple(_require(config, "fullatt_block_indexes", path)),
            }
        shape = cls(
            tower=tower,
            depth=int(_require(config, "depth", path)),
            hidden_size=int(_require(config, "hidden_size", path)),
            num_heads=int(_require(config, "num_heads", path)),
            ffn_hidden_size=int(_require(config, "intermediate_size", path)),
            in_channels=3,
            patch_size=int(_require(config, "patch_size", path)),
            temporal_patch_size=int(_require(config, "temporal_patch_size", path)),
            merge_size=int(_require(config, "spatial_merge_size", path)),
            out_hidden_size=decoder_hidden_size,
            **sizes,
        )
        _check_blocks(shape, path)
        return shape


def vision_tensor_shapes(vision: VisionShape) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every tensor of the tower, by name inside the tower, in order."""
    if vision.tower is VisionTower.qwen2_5_vl:
        return _qwen2_5_tensors(vision)
    return _qwen3_tensors(vision)


def _qwen2_5_tensors(vision: VisionShape) -> dict[str, tuple[int, ...]]:
    hidden, inner = vision.hidden_size, vision.ffn_hidden_size
    shapes = {"patch_embed.proj.weight": _patch_kernel(vision)}
    for block in range(vision.depth):
        prefix = f"blocks.{block}."
        shapes |= dict.fromkeys((f"{prefix}norm1.weight", f"{prefix}norm2.weight"), (hidden,))
        shapes |= _attention_tensors(prefix, hidden)
        shapes |= _linear(f"{prefix}mlp.gate_proj", inner, hidden)
        shapes |= _linear(f"{prefix}mlp.up_proj", inner, hidden)
        shapes |= _linear(f"{prefix}mlp.down_proj", hidden, inner)
    shapes["merger.ln_q.weight"] = (hidden,)
    shapes |= _linear("merger.mlp.0", vision.merged_size, vision.merged_size)
    return shapes | _linear("merger.mlp.2", vision.out_hidden_size, vision.merged_size)


def _qwen3_tensors(vision: VisionShape) -> dict[str, tuple[int, ...]]:
    hidden, inner = vision.hidden_size, vision.ffn_hidden_size
    shapes = {
        "patch_embed.proj.weight": _patch_kernel(vision),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (vision.num_position_embeddings, hidden),
    }
    for block in range(vision.depth):
        prefix = f"blocks.{block}."
        shapes |= _layer_norm(f"{prefix}norm1", hidden) | _layer_norm(f"{prefix}norm2", hidden)
        shapes |= _attention_tensors(prefix, hidden)
        shapes |= _linear(f"{prefix}mlp.linear_fc1", inner, hidden)
        shapes |= _linear(f"{prefix}mlp.linear_fc2", hidden, inner)
    norms = {"merger": hidden}
    norms |= {
        f"deepstack_merger_list.{index}": vision.merged_size
        for index in range(len(vision.deepstack_blocks))
    }
    for merger, width in norms.items():
        shapes |= _layer_norm(f"{merger}.norm", width)
        shapes |= _linear(f"{merger}.linear_fc1", vision.merged_size, vision.merged_size)
        shapes |= _linear(f"{merger}.linear_fc2", vision.out_hidden_size, vision.merged_size)
    return shapes


def _patch_kernel(vision: VisionShape) -> tuple[int, ...]:
    side = vision.patch_size
    return vision.hidden_size, vision.in_channels, vision.temporal_patch_size, side, side


def _attention_tensors(prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
    return _linear(f"{prefix}attn.qkv", 3 * hidden, hidden) | _linear(
        f"{prefix}attn.proj", hidden, hidden
    )


def _linear(name: str, rows: int, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, width), f"{name}.bias": (rows,)}


def _layer_norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _require(config: dict[str, Any], key: str, path: str) -> Any:
    if config.get(key) is None:
        name = f"{path}, vision_config.{key}"
        raise InputError(name, None, "a value", "a damaged config.json")
    return config[key]


def _check_blocks(shape: VisionShape, path: str) -> None:
    blocks = shape.full_attention_blocks + shape.deepstack_blocks
    if any(not 0 <= block < shape.depth for block in blocks):
        name, expected = f"{path}, blocks of vision_config", f"0..{shape.depth - 1}"
        raise InputError(name, blocks, expected, "a damaged config.json")
