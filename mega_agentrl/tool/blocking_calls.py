"""Threads for blocking calls of the run's own code, such as caches and the search index.

asyncio's default executor has few threads, and the user's code may fill it with calls that take
seconds (`asyncio.to_thread`). What the run itself needs to go on must not queue behind them.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING

from mega_agentrl.tool.call_protocol.json_text import has_many_values

if TYPE_CHECKING:
    from collections.abc import Callable


_NUM_THREADS = 16


async def call_in_thread[**P, ResultT](
    function: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs
) -> ResultT:
    """Call a function in one of the threads, and return what it returns."""
    call = partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_executor(), call)


async def call_on_arguments[**P, ResultT](
    arguments: object, function: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs
) -> ResultT:
    """Call a function whose work grows with the arguments of a tool call.

    It runs in one of the threads if these have many values, and otherwise at once.
    """
    if has_many_values(arguments):
        return await call_in_thread(function, *args, **kwargs)
    return function(*args, **kwargs)


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="blocking-calls")
