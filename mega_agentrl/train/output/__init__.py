"""Files that a run writes: metrics, rollouts, advantages, profiles and the report page."""
