"""Isolated execution of untrusted code; the only place that starts child processes."""
