"""Ways from one rank to another for a bucket of bytes: one interface, a module a technology."""
