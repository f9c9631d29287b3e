"""Workspaces with a shell, on the host's side: the pool and the root file systems."""
