"""The program inside the sandbox; standard library only, nothing else of ours is visible there."""
