"""Metrics backends beside `metrics.jsonl`."""
