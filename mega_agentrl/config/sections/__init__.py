"""The sections of the configuration schema."""
