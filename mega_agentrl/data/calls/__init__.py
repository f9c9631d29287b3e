"""Generates the function-calling task: requests that need one call, several, or none."""
