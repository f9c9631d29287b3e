"""How tool calls are written in a turn: `tags` (ARPO) and `hermes` (JSON), and the escaping."""
