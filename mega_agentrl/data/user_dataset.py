"""Rows from a user's dataset class (`data.dataset_class=FILE.py:Class` or `package.module:Class`).

    class Rows(torch.utils.data.Dataset):
        def __init__(self, paths: list[str], key: str) -> None: ...
        def __len__(self) -> int: ...
        def __getitem__(self, index: int) -> dict: ...      # a row as described in `rl_dataset`

One instance is created for each of `data.train`, `data.validation` and `sft.dev_data` (`key`), with
the paths of that setting; remote files are passed as local copies. Any class with a length and
items works. Iterable-only datasets do not: resuming and shuffling need rows by index.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.user_code import load_user_object
from mega_agentrl.errors import InputError

_KEY = "data.dataset_class"
_EXPECTED_CLASS = (
    "a subclass of torch.utils.data.Dataset, or another class with __len__ and __getitem__, whose "
    "items are mappings"
)


class DatasetTypeError(InputError, TypeError):
    """A row is not a mapping: a `TypeError`, and an `InputError` for the command line."""


def load_dataset_class(reference: str) -> type[Any]:
    """Load the class that `data.dataset_class` names.

    Raises:
        ConfigError: there is no such class, it has no `__len__` or no `__getitem__`, or it cannot
            be created with `paths` and `key`.
    """
    dataset_class = load_user_object(reference, _KEY, _EXPECTED_CLASS)
    if not isinstance(dataset_class, type):
        raise ConfigError(_KEY, reference, _EXPECTED_CLASS, f"got a {type(dataset_class).__name__}")
    # A subclass has imported torch already; the preflight runs without torch.
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and issubclass(dataset_class, torch_data.IterableDataset):
        cause = "got an IterableDataset, whose rows have no index"
        raise ConfigError(_KEY, reference, _EXPECTED_CLASS, cause)
    abstract_getitem = getattr(getattr(torch_data, "Dataset", None), "__getitem__", None)
    missing = [
        method
        for method in ("__len__", "__getitem__")
        if getattr(dataset_class, method, None) in (None, abstract_getitem)
    ]
    if missing:
        cause = f"got a class ({_format_mro(dataset_class)}) without {' and '.join(missing)}"
        raise ConfigError(_KEY, reference, _EXPECTED_CLASS, cause)
    _check_constructor(dataset_class, reference)
    return dataset_class


def _check_constructor(dataset_class: type[Any], reference: str) -> None:
    try:
        signature = inspect.signature(dataset_class)
    except ValueError:
        return  # compiled classes may not have a readable signature
    try:
        signature.bind(paths=[], key="")
    except TypeError as error:
        cause = f"its arguments are {signature}: {error}"
        expected = f"{_EXPECTED_CLASS}; its constructor takes paths and key"
        raise ConfigError(_KEY, reference, expected, cause) from error


def iter_user_rows(
    dataset_class: type[Any], paths: Sequence[str], *, key: str
) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a dataset over these paths, in order.

    Raises:
        InputError: the dataset is empty.
        DatasetTypeError: a row is not a mapping.
    """
    dataset = dataset_class(paths=list(paths), key=key)
    where = f"{key}, data.dataset_class={dataset_class.__module__}:{dataset_class.__qualname__}"
    if len(dataset) == 0:
        raise InputError(where, "no rows", "at least one row")
    for index in range(len(dataset)):
        row = dataset[index]
        if not isinstance(row, Mapping):
            got = f"a {type(row).__name__}"
            raise DatasetTypeError(f"{where} index {index}", got, "a mapping by column")
        yield row


def _format_mro(cls: type[Any]) -> str:
    return " -> ".join(base.__name__ for base in cls.__mro__[:-1])
