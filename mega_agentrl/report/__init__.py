"""Outputs for people: progress, tables, metric trackers, curves and the report page."""
