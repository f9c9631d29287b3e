"""The one configuration schema; imports no torch, validates on a login node."""
