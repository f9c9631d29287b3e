"""Records and ports (Protocols) shared by every layer; the bottom of the import order."""
