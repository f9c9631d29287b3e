"""The groups of a training step: collection, filtering, scoring."""
