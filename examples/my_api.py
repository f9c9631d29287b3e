"""A simulated service with a state, whose methods become tools: docs/own_user.md."""

from typing import Any


class TodoList:
    """Tasks by name, each with a priority."""

    def __init__(self) -> None:
        self.tasks: dict[str, int] = {}

    def _load_scenario(self, config: dict[str, Any]) -> None:
        self.tasks = config["tasks"]

    def add(self, name: str, priority: int = 1) -> dict[str, int]:
        """Adds a task, or changes its priority.

        Args:
            name: what is to be done.
            priority: 1 is the lowest.
        """
        self.tasks[name] = priority
        return {"num_tasks": len(self.tasks)}

    def finish(self, name: str) -> str:
        """Takes a task off the list."""
        if name not in self.tasks:
            raise ValueError(f"there is no task {name}")
        del self.tasks[name]
        return f"{name} is done"

    def most_urgent(self) -> str:
        """Tells the task of the highest priority."""
        return max(self.tasks, key=lambda name: self.tasks[name])
