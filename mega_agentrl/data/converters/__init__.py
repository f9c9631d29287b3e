"""Converters from published data sets to the RL format of `rl_dataset`."""
