"""The only package that starts child processes."""
