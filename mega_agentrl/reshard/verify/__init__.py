"""Verification of transferred weights by digests that do not depend on the plan."""
