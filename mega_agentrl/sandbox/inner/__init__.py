"""The program inside the wall. Standard library only: nothing else of ours is visible there."""
