"""Trajectories as chat messages: tool calls, tool answers and user messages."""
