"""Packs trajectories into training batches and splits these into token-balanced micro-batches."""
