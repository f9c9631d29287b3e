"""Verification of transferred weights: digests independent of the plan, and probe log-probs."""
