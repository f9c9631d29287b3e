"""Objects of the user's own by name: `package.module:name` or `/folder/file.py:name`.

A file gets a name of its own in `sys.modules`, so that two files called alike are two modules, and
its folder comes last on the path, for what lies beside it. Who asks checks what was found.
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


def find(path: str, where: str, default_name: str) -> tuple[str, Any]:
    """The name and the object, None where the module has none of that name.

    where: what asks, for errors. default_name: without `:name`. Raises `ValueError` for a file
    that is not there and for a module that cannot be imported.
    """
    place, colon, name = path.rpartition(":")
    if not colon:
        place, name = path, default_name
    return name, getattr(_module(place, where), name, None)


def _module(place: str, where: str) -> ModuleType:
    is_file = place.endswith(".py") or "/" in place
    if is_file and not Path(place).is_file():
        raise ValueError(
            f"{where}: there is no file {Path(place).absolute()}, expected module:name or "
            "/folder/file.py:name"
        )
    try:
        return _from_file(Path(place)) if is_file else importlib.import_module(place)
    except Exception as error:  # whatever the user's own module raises
        raise ValueError(
            f"{where}: importing {place} raised {type(error).__name__}: {error}, expected a module "
            "that can be imported; probable cause: a mistyped name, a folder not on PYTHONPATH, or "
            "an error in the module"
        ) from error


def _from_file(file: Path) -> ModuleType:
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
