"""Rollout generation with vLLM; the only package that imports vLLM."""
