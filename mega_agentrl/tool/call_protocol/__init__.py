"""Syntaxes of tool calls in a turn: `tags` (ARPO) and `hermes` (JSON), and the escaping."""
