"""Syntaxes of tool calls in a turn: `tags` (ARPO) and `hermes` (JSON), and the escaping.

To add one, add a module with a class that has the members of `HermesProtocol`, a value of
`config.enums.CallProtocol`, a branch in `toolkit._make_call_protocol`, and tests like `test_tags`:
calls that are parsed, text that is not a call, and escaped output that cannot forge a call.
"""
