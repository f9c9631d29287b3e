"""Tokenizers, chat templates and token-level truncation."""
