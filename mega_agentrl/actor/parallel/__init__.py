"""Process groups and what Megatron lacks for the parallel layouts in use."""
