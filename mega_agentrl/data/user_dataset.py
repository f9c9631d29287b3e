"""Rows from a user's dataset class (`data.dataset_class=package.module:Class`).

    class Rows(torch.utils.data.Dataset):
        def __init__(self, paths: list[str], key: str) -> None: ...
        def __len__(self) -> int: ...
        def __getitem__(self, index: int) -> dict: ...      # a row as described in `rl_dataset`

One instance is created for each of `data.train`, `data.validation` and `sft.dev_data` (`key`), with
the paths of that setting; remote files are passed as local copies. Any class with a length and
items works. Iterable-only datasets do not: resuming and shuffling need rows by index.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_EXPECTED_CLASS = (
    "expected a class of torch.utils.data.Dataset, or of anything else with __len__ and "
    "__getitem__ that gives rows as mappings"
)


class DatasetTypeError(TypeError, ValueError):
    """The class is no dataset: a `TypeError`, and a `ValueError` for the command line."""


def load_dataset_class(name: str) -> type[Any]:
    """Import the class that `package.module:Class` names.

    Raises:
        ValueError: the module or class does not exist.
        DatasetTypeError: the class is no dataset with `__len__` and `__getitem__`.
    """
    module_name, _, class_name = name.partition(":")
    where = f"data.dataset_class={name}"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{where}: {error}; expected a module that this Python can import; probable cause: it "
            "is not installed, a mistyped name, or a run started in another folder"
        ) from error
    if not hasattr(module, class_name):
        there = sorted(key for key, value in vars(module).items() if isinstance(value, type))
        raise ValueError(f"{where}: the module has no {class_name}; its classes are {there}")
    found = getattr(module, class_name)
    if not isinstance(found, type):
        raise DatasetTypeError(f"{where}: got a {type(found).__name__}, {_EXPECTED_CLASS}")
    # A subclass has imported torch already; the preflight runs without torch.
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and issubclass(found, torch_data.IterableDataset):
        raise DatasetTypeError(
            f"{where}: got an IterableDataset, whose rows have no index; {_EXPECTED_CLASS}"
        )
    placeholder = getattr(getattr(torch_data, "Dataset", None), "__getitem__", None)
    missing = [
        need
        for need in ("__len__", "__getitem__")
        if getattr(found, need, None) in (None, placeholder)
    ]
    if missing:
        raise DatasetTypeError(
            f"{where}: got a class ({_format_mro(found)}) without {' and '.join(missing)}, "
            f"{_EXPECTED_CLASS}"
        )
    return found


def iter_user_rows(
    dataset_class: type[Any], paths: Sequence[str], *, key: str
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a dataset over these paths, in order.

    Raises:
        ValueError: the dataset is empty.
        DatasetTypeError: a row is no mapping.
    """
    dataset = dataset_class(paths=list(paths), key=key)
    where = f"{key}, data.dataset_class={dataset_class.__module__}:{dataset_class.__qualname__}"
    if len(dataset) == 0:
        raise ValueError(f"{where}: the dataset is empty, expected at least one row")
    for index in range(len(dataset)):
        row = dataset[index]
        if not isinstance(row, Mapping):
            raise DatasetTypeError(
                f"{where} row {index}: got a {type(row).__name__}, expected a mapping by column"
            )
        yield row


def _format_mro(cls: type[Any]) -> str:
    return " -> ".join(one.__name__ for one in cls.__mro__[:-1])
