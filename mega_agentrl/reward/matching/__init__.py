"""Compares short answers with their ground truths: as text, numbers, structures and expressions."""
