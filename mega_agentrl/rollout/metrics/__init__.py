"""Metrics of rollout trees."""
