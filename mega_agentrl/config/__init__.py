"""The configuration schema and its checks; imports no torch."""
