"""Transports of byte frames between two ranks: one interface, one module per technology."""
