"""Training checkpoints, and export to Hugging Face folders."""
