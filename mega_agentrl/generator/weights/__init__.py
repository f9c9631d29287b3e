"""Weight updates of vLLM workers: tracing their layouts, receiving and verifying weights."""
