"""Generates the smoke task: questions that need a calculator, a search, or both."""
