"""Megatron-core models on this rank: policy, critic and reward model.

This is the only package that imports Megatron. Import `device` first: it hides a Transformer Engine
that cannot be imported (`device.hide_broken_transformer_engine`); `megatron_model` does.
"""
