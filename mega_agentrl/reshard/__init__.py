"""Weight resharding between the trainer's and the rollout engines' parallel layouts."""
