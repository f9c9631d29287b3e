"""Loads the user's own objects: `FILE.py:NAME`, `FILE.py`, `package.module:NAME`.

Tools, simulated users, datasets, rewards, advantages, losses and branching rules are loaded here,
by `importlib` and not by `hydra.utils`, which imports no files and whose errors name no setting.
Before that, `config.declarations` reads the source of advantages, losses and branching rules.

A file is imported once per process and under a unique module name, so that files with equal names
are different modules. Its folder is appended to `sys.path`, so that it can import modules beside
it. Objects of such a module cannot be unpickled in another process before that process has loaded
the same file: processes exchange the reference, and each loads the object itself.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError, check_range
from mega_agentrl.config.peer_names import describe_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType


_LOADER_FILES = (__file__, importlib.__file__)


def is_user_code(value: str) -> bool:
    """Return whether the value of a setting names the user's own code, not a built-in choice."""
    return ":" in value or value.endswith(".py")


def parse_choice[ChoiceT: str](value: str, choices: Iterable[ChoiceT], key: str) -> ChoiceT | str:
    """Return the built-in choice of this name, or the reference to the user's own code.

    The path of a file becomes absolute, because a process of the run may have another working
    folder.

    Raises:
        ConfigError: `value` is neither.
    """
    if not is_user_code(value):
        by_name = {str(choice): choice for choice in choices}
        expected = f"one of {', '.join(by_name)}, or your own: FILE.py, FILE.py:NAME or "
        check_range(value in by_name, key, value, f"{expected}package.module:NAME")
        return by_name[value]
    module, colon, name = _split_reference(value)
    return f"{Path(module).absolute()}{colon}{name}" if _is_file(module) else value


def load_user_object(
    reference: str, key: str, expected: str, *, default_name: str = "", folder: Path | None = None
) -> Any:
    """Return the object that a setting names. The caller checks its type.

    Args:
        reference: `FILE.py:NAME` or `package.module:NAME`. With a default name also `FILE.py` or
            `package.module`, without one also `package.module.NAME`.
        key: Dotted key of the setting, for errors.
        expected: What the object should be, for errors.
        default_name: Name of the object if the reference has none.
        folder: Folder that relative files are below; None is the working folder.

    Raises:
        ConfigError: There is no such object, or its module cannot be imported; `__cause__` is then
            the error of the user's code.
    """
    module_name, colon, name = _split_reference(reference)
    if not colon and default_name:
        name = default_name
    elif not colon:
        module_name, _, name = module_name.rpartition(".")
    if not module_name or not name:
        cause = "the reference has no module, or no name of an object"
        raise ConfigError(key, reference, expected, cause)
    try:
        if _is_file(module_name):
            module = _import_file((folder or Path()) / module_name)
        else:
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        cause = _describe_import_error(error, reference)
        raise ConfigError(key, reference, expected, cause) from error
    if not hasattr(module, name):
        defined = ", ".join(_defined_names(module)) or "nothing"
        raise ConfigError(
            key, reference, expected, f"the module has no {name}, but defines {defined}"
        )
    return getattr(module, name)


def find_user_source(
    reference: str, default_name: str, *, allow_compiled: bool = False
) -> tuple[Path, str]:
    """Return the source file and the object's name of a reference, without importing anything.

    Args:
        reference: `FILE.py`, `FILE.py:NAME` or `package.module:NAME`.
        default_name: Name of the object if the reference has none.
        allow_compiled: Whether the module may have no Python source.

    Raises:
        ImportError: There is no such module, or it is not a Python file.
        FileNotFoundError: There is no such file.
    """
    module, _, name = _split_reference(reference)
    file = Path(module) if _is_file(module) else _find_module_file(module)
    if file.suffix != ".py" and (_is_file(module) or not allow_compiled):
        raise ImportError(f"{file} does not end in .py")
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    return file.resolve(), name or default_name


def _find_module_file(module: str) -> Path:
    """Return the file of `a.b`; unlike `importlib.util.find_spec`, without importing `a`."""
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package) if package else None
    for part in parts:
        if spec is None:
            break
        package += f".{part}"
        spec = PathFinder.find_spec(package, spec.submodule_search_locations or [])
    if spec is None or not spec.origin:
        raise ModuleNotFoundError(
            f"No module named {module!r}; not installed, mistyped, or not below the working "
            "folder or PYTHONPATH"
        )
    return Path(spec.origin)


def _split_reference(reference: str) -> tuple[str, str, str]:
    """Return the module, the colon and the name; the last two are empty without a colon."""
    module, colon, name = reference.rpartition(":")
    return (module, colon, name) if colon else (reference, "", "")


def _is_file(module: str) -> bool:
    return module.endswith(".py") or "/" in module


def _import_file(file: Path) -> ModuleType:
    file = file.resolve()
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _defined_names(module: ModuleType) -> list[str]:
    """Return the public names of a module, without the modules that it imports."""
    names = vars(module).items()
    return [name for name, value in names if name[0] != "_" and not isinstance(value, type(sys))]


def source_location(function: Callable[..., Any]) -> str:
    """Return `FILE, line N` of a function, or its module where there is no source."""
    function = inspect.unwrap(function)
    try:
        return f"{inspect.getsourcefile(function)}, line {inspect.getsourcelines(function)[1]}"
    except (TypeError, OSError):
        return str(getattr(function, "__module__", "no source"))


def _describe_import_error(error: BaseException, reference: str) -> str:
    """Return one line: the error, where in the user's code it was raised, and a probable cause."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [
        (frame.filename, frame.lineno)
        for frame in trace
        if not frame.filename.startswith("<") and frame.filename not in _LOADER_FILES
    ]
    message = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        message = error.msg  # the whole message has only the last part of the path
        frames.append((error.filename, error.lineno))
    text = " ".join(f"{type(error).__name__}: {message}".split())
    # The first line is the user's, the last may be in a module that it imports.
    if places := dict.fromkeys(f"{file}, line {line}" for file, line in frames[:1] + frames[-1:]):
        text += f" ({'; raised in '.join(places)})"
    if isinstance(error, ModuleNotFoundError):
        text += "; not installed, mistyped, or not below the working folder or PYTHONPATH"
        # What the line imports, or else what the setting names.
        known = (describe_class(line) for line in (trace[-1].line or "", reference))
        text += next((f"; {sentence}" for sentence in known if sentence), "")
    return text
