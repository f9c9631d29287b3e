"""An agent that is a Python function of the user, run on the event loop of the agents.

The function is trusted code in the process of the trainer. An ordinary function runs in a thread of
its own, which cannot be ended: if it may hang, make it a command (`agents.command`).
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.user_code import source_location
from mega_agentrl.rollout.agents.daemon_thread import DaemonThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mega_agentrl.rollout.agents.base import AgentTask

ARGUMENTS = ("prompt", "base_url", "api_key", "tools_kwargs")
"""Arguments of the function, passed by name if it has parameters of these names."""
ROW_ARGUMENTS = (
    *("data_source", "ground_truth", "extra_info", "environment_kwargs"),
    *("seed", "attempt", "attempt_id"),
)
"""Further ones, which options of the same names replace."""


class FunctionAgent:
    """Calls a function for each attempt.

    Args:
        function: The user's function.
        options: Further arguments, from the configuration.
        key: Dotted key of the setting that names it, for errors.

    Raises:
        ConfigError: the function does not take these arguments.
    """

    def __init__(
        self, function: Callable[..., Any], options: Mapping[str, Any], key: str = "rollout.agent"
    ) -> None:
        self.name = source_location(function)
        parameters = inspect.signature(function).parameters
        takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        names = [*ARGUMENTS, *(name for name in ROW_ARGUMENTS if name not in options)]
        self._names = [name for name in names if takes_all or name in parameters]
        try:
            inspect.signature(function).bind(**dict.fromkeys(self._names), **options)
        except TypeError as error:
            raise ConfigError(
                key,
                self.name,
                f"a function of any of {', '.join(names)} and of the options {sorted(options)}",
                str(error),
            ) from error
        self._function = partial(function, **options)
        self._is_async = inspect.iscoroutinefunction(function)

    async def run(self, task: AgentTask) -> Any:
        """Run the function and return what it returns."""
        call = partial(self._function, **{name: getattr(task, name) for name in self._names})
        return await (call() if self._is_async else _call_in_thread(call))


async def _call_in_thread(call: Callable[[], Any]) -> Any:
    thread = DaemonThread("agent")
    try:
        return await thread.call(call)
    finally:
        thread.stop()
