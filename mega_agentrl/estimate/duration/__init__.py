"""Predicts the seconds of a step, by phase, and how long policy and engines wait for each other."""
