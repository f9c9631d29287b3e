"""Trajectories, trees, branching under a budget, collection."""
