"""The loop, its phases, evaluation and metrics."""
