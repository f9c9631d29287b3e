"""Checks whether a configuration fits its GPUs and suggests changes if it does not."""
