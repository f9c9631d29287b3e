"""Arithmetic that policy and engine share, with results that do not depend on the layout."""
