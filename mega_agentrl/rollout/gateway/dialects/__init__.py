"""The APIs that the gateway speaks, one module each with the members of `base.Dialect`.

To add one, write such a module and list its path in `rollout.gateway.server`.
"""
