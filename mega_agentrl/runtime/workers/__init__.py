"""Ray actor groups of policy, critic, reward model and engines, and their coordination."""
