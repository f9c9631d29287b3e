"""Records, their storage, errors and protocols for every layer; the bottom of the import order."""
