"""Megatron-core models on this rank: policy, critic and reward model.

This is the only package that imports Megatron.
"""
