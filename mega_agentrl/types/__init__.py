"""Records, errors and protocols that every layer uses; the bottom of the import order."""
