"""What a person sees: progress, tables, curves."""
