"""From trajectories to token-balanced micro-batches."""
