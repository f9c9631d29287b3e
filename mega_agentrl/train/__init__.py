"""The training loop: rollouts, advantages, updates, evaluation, checkpoints and metrics."""
