"""Micro-batches, objectives, the pipeline schedule, Adam and offloading."""
