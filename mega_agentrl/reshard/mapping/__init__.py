"""Mapping between Hugging Face tensors and Megatron-core parameters."""
