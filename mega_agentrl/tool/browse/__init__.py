"""The browse tool: URL rules, page fetching and text extraction."""
