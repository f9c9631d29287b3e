"""Reinforcement learning of tool-using language-model agents at Megatron scale."""
