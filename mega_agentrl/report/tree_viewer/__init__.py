"""Data of the rollout-tree viewer on the report page."""
