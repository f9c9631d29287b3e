"""The Megatron GPT model: layers, attention over packed rows, output heads."""
