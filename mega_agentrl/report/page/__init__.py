"""The report page: charts, tables and summary tiles."""
