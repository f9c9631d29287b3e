"""Checks of conditions across sections of a configuration."""
