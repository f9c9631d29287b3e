"""Megatron-core models on this rank: policy, critic and reward model.

This is the only package that imports Megatron. Import `device` first: it hides a Transformer Engine
that cannot be used (`device.hide_unusable_transformer_engine`); `megatron_model` does.
"""
