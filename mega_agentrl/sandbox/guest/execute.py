"""Executes code like `python -c`, or like the next cell of a notebook."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import traceback
import types

EXIT_FLUSH_FAILED = 120
"""Python's own exit code when it cannot flush."""


def new_main_module() -> types.ModuleType:
    """Create an empty `__main__` module, as `python -c` does."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    return module


def run_to_exit(module: types.ModuleType, code: str) -> int:
    """Run `code`, its threads and its exit handlers to the end; return the exit code."""
    status = run_code(module, code)
    threading._shutdown()  # type: ignore[attr-defined]  # also ends open executors
    atexit._run_exitfuncs()
    return flush_output() or status


def run_code(module: types.ModuleType, code: str) -> int:
    """Run `code` in `module` and return its exit code; an exception is printed."""
    try:
        # dont_inherit: the future statement at the top of this file must not apply to the code.
        exec(compile(code, "<string>", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        with contextlib.suppress(BaseException):  # both belong to the code
            print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001  the policy's code may raise anything
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        with contextlib.suppress(BaseException):
            traceback.print_exception(type(error), error, frames)
        return 1
    return 0


def flush_output() -> int:
    """Flush stdout and stderr; return 0, or `EXIT_FLUSH_FAILED`."""
    status = 0
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # noqa: BLE001  the disk is full, or the code replaced the stream
            status = EXIT_FLUSH_FAILED
    return status
