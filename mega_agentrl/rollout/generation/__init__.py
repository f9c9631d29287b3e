"""Engine requests of a trajectory: seeds, token buffer, turns, interruption."""
