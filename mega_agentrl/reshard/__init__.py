"""Which rectangle of which Hugging Face tensor lives where, and how it moves."""
