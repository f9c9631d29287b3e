"""ARES in training: entropy statistics, reward shaping and the bootstrap pass."""
