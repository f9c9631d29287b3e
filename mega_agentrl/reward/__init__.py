"""What a trajectory earned."""
