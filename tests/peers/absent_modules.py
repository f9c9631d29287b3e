"""Stand-ins for modules that a peer imports, but that what is compared never calls.

The peers are installed without their dependencies. Every name of an absent module is a class that
can be called, subclassed and used as a decorator.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Iterable

VERSION = "999.0.0"


class _AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (_Anything,), {})


class _Anything(metaclass=_AnyName):
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if args else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _AbsentModule(types.ModuleType):
    __path__ = ()
    __version__ = VERSION

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (_Anything,), {"__module__": self.__name__})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self._names = frozenset(names)

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _AbsentModule(spec.name)

    def exec_module(self, module):
        pass


def stand_in_for(names: Iterable[str]) -> None:
    """Replace these top-level modules in this process, whether they are installed or not."""
    absent = set(names)
    sys.meta_path.insert(0, _Finder(absent))
    real_version = importlib.metadata.version

    def version(distribution: str) -> str:
        return VERSION if distribution in absent else real_version(distribution)

    importlib.metadata.version = version
