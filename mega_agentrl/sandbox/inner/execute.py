"""Runs a piece of code as `python -c`, or as the next cell of a notebook."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import traceback
import types

UNFLUSHED = 120
"""What Python itself answers when it cannot flush."""


def new_main() -> types.ModuleType:
    """An empty `__main__` as `python -c` has it."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    return module


def run_once(module: types.ModuleType, code: str) -> int:
    """Run `code` to the end of its threads and exit handlers; its exit code."""
    status = run(module, code)
    threading._shutdown()  # type: ignore[attr-defined]  # also ends executors left open
    atexit._run_exitfuncs()
    return flush() or status


def run(module: types.ModuleType, code: str) -> int:
    """Run `code` in `module`; its exit code. What it raises is printed."""
    try:
        # Not inherited: the future statement at the top of this file.
        exec(compile(code, "<string>", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        with contextlib.suppress(BaseException):  # the code's own text, its own stream
            print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  whatever the policy wrote
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        with contextlib.suppress(BaseException):
            traceback.print_exception(type(error), error, frames)
        return 1
    return 0


def flush() -> int:
    """Write out what is buffered; 0, or `UNFLUSHED`."""
    status = 0
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # noqa: BLE001  full, or replaced by the code
            status = UNFLUSHED
    return status
