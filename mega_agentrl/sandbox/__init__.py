"""Isolated execution of untrusted code; the only package that starts child processes."""
