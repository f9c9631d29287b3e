"""Environments with somebody else's interface as agents: verifiers, OpenEnv, Gymnasium.

Each adapter is named by `rollout.agent._target_`. None of the packages is a dependency: an adapter
imports its package when it is constructed. `episode` plays an environment with `reset` and `step`
against the gateway.
"""
