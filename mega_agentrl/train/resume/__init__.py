"""Continue a run: its folder, its checkpoints, and the restart of a lost policy."""
