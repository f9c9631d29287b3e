"""Rows from a class of one's own (`data.dataset_class=package.module:Class`).

    class Rows(torch.utils.data.Dataset):
        def __init__(self, paths: list[str], key: str) -> None: ...
        def __len__(self) -> int: ...
        def __getitem__(self, index: int) -> dict: ...      # a row, as `data.dataset` reads them

It is made once for each of `data.train`, `data.validation` and `sft.dev` (`key`) with what that
names; remote files are given as their local copies. Any class with a length and items will do.
One that only iterates will not: a run that goes on, and every epoch, need rows by number.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_EXPECTED = (
    "expected a class of torch.utils.data.Dataset, or of anything else with __len__ and "
    "__getitem__ that gives rows as mappings"
)


class DatasetTypeError(TypeError, ValueError):
    """Not a dataset: a `TypeError` for who calls, bad input for the command line."""


def dataset_class(name: str) -> type[Any]:
    """The class that `package.module:Class` names; imports the module.

    Raises ValueError where there is none, `DatasetTypeError` where it is no dataset.
    """
    module_name, _, class_name = name.partition(":")
    where = f"data.dataset_class={name}"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{where}: {error}; expected a module that this Python can import; probable cause: it "
            "is not installed, a mistyped name, or a run that was started in another folder"
        ) from error
    if not hasattr(module, class_name):
        there = sorted(key for key, value in vars(module).items() if isinstance(value, type))
        raise ValueError(f"{where}: the module has no {class_name}; its classes are {there}")
    found = getattr(module, class_name)
    if not isinstance(found, type):
        raise DatasetTypeError(f"{where}: got a {type(found).__name__}, {_EXPECTED}")
    # Who derives from it has imported it; the preflight runs where there is no torch.
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and issubclass(found, torch_data.IterableDataset):
        raise DatasetTypeError(
            f"{where}: got an IterableDataset, whose rows have no number; {_EXPECTED}"
        )
    placeholder = getattr(getattr(torch_data, "Dataset", None), "__getitem__", None)
    missing = [
        need
        for need in ("__len__", "__getitem__")
        if getattr(found, need, None) in (None, placeholder)
    ]
    if missing:
        raise DatasetTypeError(
            f"{where}: got a class ({_bases(found)}) without {' and '.join(missing)}, {_EXPECTED}"
        )
    return found


def own_rows(found: type[Any], paths: Sequence[str], *, key: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a dataset over these paths, in order.

    Raises `DatasetTypeError` for a row that is no mapping, and ValueError for no rows.
    """
    dataset = found(paths=list(paths), key=key)
    where = f"{key}, data.dataset_class={found.__module__}:{found.__qualname__}"
    if len(dataset) == 0:
        raise ValueError(f"{where}: the dataset is empty, expected at least one row")
    for index in range(len(dataset)):
        row = dataset[index]
        if not isinstance(row, Mapping):
            raise DatasetTypeError(
                f"{where} row {index}: got a {type(row).__name__}, expected a mapping by column"
            )
        yield row


def _bases(found: type[Any]) -> str:
    return " -> ".join(one.__name__ for one in found.__mro__[:-1])
