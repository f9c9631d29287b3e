"""User datasets: which classes are accepted, and the errors for all others."""

import sys
from types import ModuleType

import pytest
from torch.utils.data import Dataset, IterableDataset

from mega_agentrl.data.user_dataset import DatasetTypeError, iter_user_rows, load_dataset_class
from tests.config.refusals import refused, refused_input


class Torch(Dataset):
    def __init__(self, paths, key):
        self.rows = [{"path": path, "key": key} for path in paths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Sequence:
    def __init__(self, paths, key):
        self.trajectories = paths

    def __len__(self):
        return len(self.trajectories)

    def __getitem__(self, index):
        return self.trajectories[index]


class Endless(IterableDataset):
    def __iter__(self):
        yield {}


class NoLength(Dataset):
    def __getitem__(self, index):
        return {}


class NoItems(Dataset):
    def __len__(self):
        return 1


class NoKey(Sequence):
    def __init__(self, paths):
        super().__init__(paths, "")


@pytest.fixture(autouse=True)
def module(monkeypatch):
    made = ModuleType("my_rows")
    for kind in (Torch, Sequence, Endless, NoLength, NoItems, NoKey):
        setattr(made, kind.__name__, kind)
    made.function = lambda paths, key: []
    monkeypatch.setitem(sys.modules, "my_rows", made)


def test_torch_datasets_and_classes_with_their_methods_are_accepted():
    assert load_dataset_class("my_rows:Torch") is Torch
    assert load_dataset_class("my_rows:Sequence") is Sequence
    rows = list(iter_user_rows(Torch, ["a", "b"], key="data.train"))
    assert rows == [{"path": "a", "key": "data.train"}, {"path": "b", "key": "data.train"}]


@pytest.mark.parametrize(
    ("reference", "cause"),
    [
        ("my_rows:function", "got a function"),
        ("my_rows:NoKey", "its arguments are (paths)"),
        ("my_rows:Endless", "got an IterableDataset"),
        ("my_rows:NoLength", "without __len__"),
        ("my_rows:NoItems", "without __getitem__"),
        ("my_rows:Rows", "no Rows"),
        ("no_such_rows:Rows", "ModuleNotFoundError"),
    ],
)
def test_another_object_is_refused(reference, cause):
    error = refused(load_dataset_class, reference)
    assert (error.key, error.got) == ("data.dataset_class", reference)
    assert cause in error.cause


def test_an_empty_dataset_and_rows_that_are_no_mappings_are_refused():
    assert issubclass(DatasetTypeError, TypeError)
    with pytest.raises(DatasetTypeError) as wrong_type:
        list(iter_user_rows(Sequence, ["a"], key="data.dev"))
    assert wrong_type.value.name.endswith(":Sequence index 0") and wrong_type.value.got == "a str"
    empty = refused_input(lambda: list(iter_user_rows(Sequence, [], key="data.dev")))
    for error in (wrong_type.value, empty):
        assert error.name.startswith("data.dev, data.dataset_class=")
