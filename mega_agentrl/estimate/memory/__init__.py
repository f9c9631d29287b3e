"""Predicts the memory of policy, critic and engine ranks."""
