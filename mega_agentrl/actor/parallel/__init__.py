"""Process groups and context parallelism."""
