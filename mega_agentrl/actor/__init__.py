"""Megatron-core models on this rank: policy, critic and reward model.

This is the only package that imports Megatron, which imports Transformer Engine if it is installed.
"""

from mega_agentrl.actor.device import hide_broken_transformer_engine

hide_broken_transformer_engine()
