"""Reward functions, and the rubrics that combine them."""
