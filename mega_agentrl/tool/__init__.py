"""Tools an agent can call: protocol, registry, call parsing, python, search."""
