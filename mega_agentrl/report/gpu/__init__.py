"""Sample the GPUs of a run and aggregate their metrics."""
