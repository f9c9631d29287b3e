"""Images of vision-language models: files, pixels, placeholders and positions; needs no torch."""
