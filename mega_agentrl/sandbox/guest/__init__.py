"""The program inside the sandbox, which sees only the standard library and this package."""
