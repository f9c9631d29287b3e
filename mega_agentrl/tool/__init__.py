"""Tools an agent can call: base class, toolkit, call protocols, and the built-in tools."""
