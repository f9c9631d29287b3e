"""Rollout trees as nodes, files and text."""
