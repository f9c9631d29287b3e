"""Megatron-core models on this rank: policy, critic and reward model.

This is the only package that imports Megatron. `device` is imported before it, to hide a
Transformer Engine that cannot be imported (`device.hide_broken_transformer_engine`).
"""

from mega_agentrl.actor import device

__all__ = ["device"]
