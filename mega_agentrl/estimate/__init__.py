"""Predicts memory, weight-transfer time and FLOPs of a run from its configuration alone."""
