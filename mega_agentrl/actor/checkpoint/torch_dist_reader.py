"""Reader of checkpoints in Megatron's `torch_dist` format, which runs no code of the checkpoint.

Torch's own reader unpickles `.metadata`, and its planner unpickles the objects that are stored
beside the tensors; either may run any code. Here `.metadata` is read into plain records and checked
before anything else, and tensors and objects are read with `weights_only`. `metadata.json`, which
holds nothing that a run needs, is not read.

The private names that are imported from torch are those of the pinned version.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mega_agentrl.actor.megatron_compat import replace_keys_with_sharded_keys
from mega_agentrl.config.input_files import reading
from mega_agentrl.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.planner import ReadItem

METADATA_FILE = ".metadata"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_PATH_CLASSES = ("PosixPath", "PurePosixPath")
_RECORD_CLASSES = frozenset(
    {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        # Python 3.13 writes the second name.
        *((module, name) for module in ("pathlib", "pathlib._local") for name in _PATH_CLASSES),
        *(
            (_METADATA_MODULE, name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)
"""Names that `.metadata` may refer to, beside dtypes and `torch.Size`."""
_EXPECTED = "the metadata of a checkpoint"


def read_sharded_state(
    state: Mapping[str, ShardedTensor | ShardedObject], folder: Path
) -> dict[str, Any]:
    """Read a checkpoint into the tensors of a state; all ranks call this.

    Args:
        state: Sharded tensors, whose data are written in place, and sharded objects.
        folder: Folder of the checkpoint.

    Returns:
        The objects, by their names in `state`.

    Raises:
        ValueError: On all ranks, before anything is read, if the metadata is damaged.
        RuntimeError: The checkpoint has no such tensor or object, or one of another shape.
    """
    by_key, _, names = replace_keys_with_sharded_keys(dict(state))
    values = mcore_to_pyt_state_dict(by_key, True)
    object_keys = {one.unique_key for one in state.values() if isinstance(one, ShardedObject)}
    tensors = [one for one in state.values() if isinstance(one, ShardedTensor)]
    _load(values, folder, object_keys, tensors, no_dist=dist.get_world_size() == 1)
    return {names[key][0]: values[key][0] for key in object_keys}


def read_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Read whole tensors in place, in a single process without ranks.

    Raises:
        ValueError: The metadata is damaged.
        RuntimeError: The checkpoint has no such tensor, or one of another shape.
    """
    _load(tensors, folder, (), (), no_dist=True)


def _load(
    values: dict[str, Any],
    folder: Path,
    object_keys: Collection[str],
    tensors: Collection[ShardedTensor],
    *,
    no_dist: bool = False,
) -> None:
    reader = _Reader(folder)
    planner = _Planner(object_keys, shapes_validation_sharded_tensors=tensors)
    try:
        dcp.load(values, storage_reader=reader, planner=planner, no_dist=no_dist)
    except CheckpointException as error:  # it is no Exception
        raise RuntimeError(f"checkpoint {folder} cannot be read: {error}") from error


class _Reader(FileSystemReader):
    """Reads the files that checked metadata names."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._checked_metadata = read_metadata(folder)

    def read_metadata(self) -> Metadata:  # type: ignore[override] # torch asks for no other one
        """Return the checked metadata."""
        return self._checked_metadata


class _Planner(MCoreLoadPlanner):  # type: ignore[misc]
    """Reads objects with `weights_only`, and none in the place of a tensor."""

    def __init__(self, object_keys: Collection[str], **options: Any) -> None:
        super().__init__(**options)
        self._object_keys = object_keys

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read an object."""
        key = read_item.dest_index.fqn
        if key not in self._object_keys:
            raise InputError(key, "an object", "a tensor")
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        if not isinstance(loaded, list) or len(loaded) != 1:
            raise InputError(key, type(loaded).__name__, "a list of one object")
        self.original_state_dict[key] = loaded


def read_metadata(folder: Path) -> Metadata:
    """Read and check the metadata of a checkpoint.

    Raises:
        ValueError: It is damaged, or refers to anything but the parts of the files in the folder.
    """
    path = folder / METADATA_FILE
    with reading(str(path), METADATA_FILE, _EXPECTED):
        fields = _RecordUnpickler(path.read_bytes()).load().fields
    with _checking(path):
        tensors = {str(key): _storage_of(one) for key, one in fields["state_dict_metadata"].items()}
        sizes: dict[str, int] = {}
        parts = dict(
            _part_of(index.fields, info.fields, folder, sizes)
            for index, info in fields["storage_data"].items()
        )
    return Metadata(state_dict_metadata=tensors, storage_data=parts, storage_meta=StorageMeta())


@contextmanager
def _checking(path: Path) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, IndexError, OverflowError) as error:
        got = f"{type(error).__name__}: {error}"
        raise InputError(str(path), got, _EXPECTED, "a damaged or foreign file") from None


class _Record:
    """The arguments and the state of a pickled object, as plain data that nothing interprets."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """Fields by name.

        Raises:
            TypeError: The state is something else.
        """
        if not isinstance(self.state, dict):
            raise TypeError(f"{type(self).__name__} has no fields")
        return self.state


class LimitedUnpickler(pickle.Unpickler):
    """Reads objects that refer to some names, dtypes and `torch.Size`, and to nothing else.

    Args:
        data: The pickled object.
        names: The modules and names.
    """

    def __init__(self, data: bytes, names: Collection[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        """Return an object by its name; raises `UnpicklingError` for one that is not allowed."""
        found = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if found is torch.Size or isinstance(found, torch.dtype):
            return found
        if (module, name) not in self._names:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return self.find_allowed(module, name)

    def find_allowed(self, module: str, name: str) -> Any:
        """Return the object of a name that is allowed."""
        return super().find_class(module, name)


class _RecordUnpickler(LimitedUnpickler):
    """Reads the objects of `.metadata` as records; nothing of the file is called.

    Each reading has classes of its own, which the file therefore cannot change for others.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data, _RECORD_CLASSES)
        self._classes: dict[tuple[str, str], Any] = {}

    def find_allowed(self, module: str, name: str) -> Any:
        """Return the class of a record."""
        return self._classes.setdefault((module, name), type(name, (_Record,), {}))


def _storage_of(record: _Record) -> TensorStorageMetadata | BytesStorageMetadata:
    """Return the storage of a tensor or an object.

    Raises:
        ValueError: A part is not within the tensor, or it has another kind of value.
    """
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = record.fields
    dtype, size = fields["properties"].state[0], _size(fields["size"])
    if not isinstance(dtype, torch.dtype):
        raise InputError("the dtype of a tensor", dtype, "one of torch")
    chunks = []
    for chunk in fields["chunks"]:
        offsets, sizes = _size(chunk.fields["offsets"]), _size(chunk.fields["sizes"])
        if not len(offsets) == len(sizes) == len(size) or any(
            start + count > full for start, count, full in zip(offsets, sizes, size, strict=True)
        ):
            raise InputError("a part of a tensor", f"{sizes} at {offsets}", f"one within {size}")
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _part_of(
    index: Mapping[str, Any], info: Mapping[str, Any], folder: Path, sizes: dict[str, int]
) -> tuple[MetadataIndex, _StorageInfo]:
    """Return the key of a part, and where its bytes are.

    Args:
        index: Fields of the key.
        info: File, offset and length.
        folder: Folder of the checkpoint.
        sizes: Sizes of the files that are known already.

    Raises:
        ValueError: The file is not in the folder or has fewer bytes, or the part is compressed.
    """
    name, offset, length = info["relative_path"], info["offset"], info["length"]
    path = folder / str(name)
    if name not in sizes:
        if path.name != name or path.is_symlink() or not path.is_file():
            raise InputError("the file of a part", name, f"a file in {folder}")
        sizes[name] = path.stat().st_size
    if not _is_count(offset) or not _is_count(length) or offset + length > sizes[name]:
        raise InputError(f"a part of {path}", f"{length} bytes at {offset}", "bytes of the file")
    if info.get("transform_descriptors"):
        raise InputError(f"a part of {path}", info["transform_descriptors"], "no transformation")
    at = index.get("offset")
    key = MetadataIndex(str(index["fqn"]), None if at is None else _size(at))
    return key, _StorageInfo(name, offset, length)


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple) or not all(map(_is_count, value)):
        raise InputError("a shape in the metadata", value, "numbers from 0")
    return torch.Size(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
