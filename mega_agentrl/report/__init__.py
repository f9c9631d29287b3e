"""What a person sees: progress, tables, curves, the report page with its viewer of trees."""
