"""Datasets, resumable sampling, chat templates and tokenization."""
