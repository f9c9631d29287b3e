"""Environments with somebody else's interface as agents: verifiers, OpenEnv, Gymnasium.

Each adapter is named by `rollout.agent._target_`. No package is a dependency: the adapters of
verifiers and Gymnasium import theirs when they are constructed, and an OpenEnv server is spoken to
in its own protocol. `episode` plays an environment with `reset` and `step` against the gateway.
"""
