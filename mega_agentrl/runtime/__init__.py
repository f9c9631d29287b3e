"""The only package that imports Ray."""
