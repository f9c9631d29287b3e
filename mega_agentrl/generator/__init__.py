"""The only package that imports vLLM."""
