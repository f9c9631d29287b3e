"""Sandbox hosts as Ray actors, and their clients and supervision on the driver."""
