"""Agents of the user as rollouts: functions and commands that talk to the gateway."""
