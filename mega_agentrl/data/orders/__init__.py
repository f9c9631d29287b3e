"""Generates the order game: an assistant asks a customer, then places the order."""
