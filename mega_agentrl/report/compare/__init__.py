"""Compare finished runs and algorithms."""
