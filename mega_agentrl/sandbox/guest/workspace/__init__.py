"""The workspace of a trajectory: file systems in layers, a shell and a file editor."""
