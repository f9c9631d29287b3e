"""Generates the vision task: questions about pictures, some of which need a closer look."""
