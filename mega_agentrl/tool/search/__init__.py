"""The search tool: a local full-text index, a retrieval server or a web-search API."""
