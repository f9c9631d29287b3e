"""Branch policies, fork budgets and ARPO's lock-step rollout."""
