"""Exact token entropies, measured on the logits inside vLLM's workers."""
