"""Load the user's own objects from `package.module:name` or `/folder/file.py:name`.

A file is imported under a unique module name, so that files with equal names are different modules.
Its folder is appended to `sys.path`, so that it can import modules beside it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType


def load_user_object(path: str, where: str, default_name: str) -> tuple[str, Any]:
    """Return the name of an object and the object, or None if the module lacks the name.

    The caller checks the type of the object.

    Args:
        path: `package.module:name` or `/folder/file.py:name`.
        where: configuration key of the path, for error messages.
        default_name: name to look up if `path` has no `:name`.

    Raises:
        ValueError: the file does not exist or the module cannot be imported.
    """
    module, colon, name = path.rpartition(":")
    if not colon:
        module, name = path, default_name
    return name, getattr(_import_user_module(module, where), name, None)


def _import_user_module(module: str, where: str) -> ModuleType:
    is_file = module.endswith(".py") or "/" in module
    if is_file and not Path(module).is_file():
        raise ValueError(
            f"{where}: there is no file {Path(module).absolute()}, expected module:name or "
            "/folder/file.py:name"
        )
    try:
        return _import_file(Path(module)) if is_file else importlib.import_module(module)
    except Exception as error:  # the user's module may raise anything
        raise ValueError(
            f"{where}: importing {module} raised {type(error).__name__}: {error}, expected an "
            "importable module; probable cause: a mistyped name, a folder not on PYTHONPATH, or an "
            "error in the module"
        ) from error


def _import_file(file: Path) -> ModuleType:
    file = file.resolve()
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
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
