"""Files of rollout trees, in JSON lines with one tree per line.

Each line is self-contained::

    {"format": 3, "stage": "rl", "step": 20, "index": 0, "num_trees": 32, "prompt": {...},
     "nodes": [{"parent": null, "path": [0], "start": 0, "stop": 9, "turn": {...},
     "token_ids": [...], "loss_mask": 1, "logps": {"f4": [...]}, ...}, ...],
     "leaves": [{"last_node": 4, "path": [0], ...}, ...], "num_forks": 3, ...}

``turn`` is null if the turn continues in later nodes. A token field with a single value
throughout is stored as that value. Floats that are exact in float32 are written with the digits
that float32 needs, under ``f4``; others with full precision. Every number is restored exactly.
Values annotated as `Any` are not: a tuple returns as a list, and a value without a JSON form as
text.

Images are written once beside the files, into the folder `images`, under their ids: as they are if
they are small, otherwise reduced (`image_files`). Lines hold their ids and sizes, and neither
pixels nor bytes: the images of an outcome are those of its trajectory.

Files are written under a temporary name and renamed when they are complete: a crash loses only the
step being written, and a reader never sees a partial file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np

from mega_agentrl.errors import InputError
from mega_agentrl.rollout.io.image_files import (
    restore_messages,
    without_bytes,
    write_images,
)
from mega_agentrl.rollout.io.nodes import (
    LEFT_OUT_FIELDS,
    NODE_FIELDS,
    TREE_FIELDS,
    NodeTree,
    TreeLeaf,
    TreeNode,
    to_node_tree,
)
from mega_agentrl.types.atomic_file import atomic_path
from mega_agentrl.types.records import Prompt, RolloutTree, Trajectory, Turn
from mega_agentrl.types.serialization import from_builtins, to_builtins

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

FORMAT_VERSION = 3
MAX_TREE_TOKENS = 1 << 24
"""Tokens of a tree, shared ones once: 64 answers of 262,144 tokens. A line of a few bytes can name
any number of equal tokens."""
_CORRUPT_FILE_CAUSE = "another program's file, or a copy that was cut"


@dataclass(slots=True, kw_only=True, frozen=True)
class StoredTree:
    """A tree and the step it was sampled in."""

    stage: str
    """Stage of the run, such as `rl` or `held_out_before`."""
    step: int
    """Step within the stage."""
    tree: NodeTree


@dataclass(slots=True, kw_only=True, frozen=True)
class _Float32List:
    """Numbers that are exact in float32."""

    f4: list[float]
    """The numbers, with the digits that float32 needs."""


PackedInts = int | list[int]
PackedFloats = float | list[float] | _Float32List


@dataclass(slots=True, kw_only=True, frozen=True)
class _StoredNode:
    """A `TreeNode` with packed token fields."""

    parent: int | None
    path: tuple[int, ...]
    start: int
    stop: int
    turn: Turn | None
    token_ids: PackedInts
    loss_mask: PackedInts
    logps: PackedFloats
    entropies: PackedFloats
    versions: PackedInts
    argmax_ids: PackedInts


def stored_class(record: type, leave_out: Collection[str], **own: Any) -> Any:
    """Return a dataclass of the fields of `record`, except `leave_out`, and of those in `own`.

    Fields have the defaults of the record, so that a file of a version without one of them can be
    read.

    Args:
        record: The record.
        leave_out: Names of fields.
        own: Types by name, of further fields and of fields that are stored in another form.
    """
    specs = {spec.name: spec for spec in fields(record)}
    hints = {name: hint for name, hint in get_type_hints(record).items() if name not in leave_out}
    stored: list[Any] = []
    for name, kind in (own | {name: hints[name] for name in specs if name in hints}).items():
        spec = specs.get(name)
        if spec is None:
            stored.append((name, kind))
        else:
            default = field(default=spec.default, default_factory=spec.default_factory)  # type: ignore[call-overload]
            stored.append((name, own.get(name, kind), default))
    return make_dataclass(f"Stored{record.__name__}", stored, kw_only=True)


_LINE_HEAD = {
    "format": int,
    "stage": str,
    "step": int,
    "index": int,
    "num_trees": int,
    "prompt": Prompt,
    "nodes": list[_StoredNode],
    "leaves": list[dict[str, Any]],
}
_StoredLine = stored_class(RolloutTree, TREE_FIELDS, **_LINE_HEAD)
_StoredLeaf = stored_class(Trajectory, NODE_FIELDS | LEFT_OUT_FIELDS, last_node=int | None)


def write_trees(path: Path, trees: Sequence[RolloutTree], *, stage: str, step: int) -> None:
    """Write all trees of one step, replacing an existing file, and their images beside it."""
    write_images(path.parent, trees)
    with atomic_path(path, fsync=True) as temporary, temporary.open("w", encoding="utf-8") as file:
        for index, tree in enumerate(trees):
            head = {"format": FORMAT_VERSION, "stage": stage, "step": step}
            head |= {"index": index, "num_trees": len(trees)}
            line = to_builtins(
                head | _tree_to_line(to_node_tree(without_bytes(tree))), fallback=str
            )
            # Escaped, because a tool answer may hold a lone surrogate, which is not valid UTF-8.
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_trees(path: Path) -> Iterator[StoredTree]:
    """Yield the trees of a file in order.

    Raises:
        ValueError: The file is incomplete, damaged or of another format. The message names file and
            line; the trees before that line were already yielded.
    """
    number, expected = 0, 0
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            where = f"{path}:{number}"
            line = _parse_line(text, where)
            expected = line.num_trees
            if line.index != number - 1 or number > expected:
                got, cause = (
                    f"tree {line.index} of {expected}",
                    "lines missing, or two files in one",
                )
                raise InputError(where, got, f"tree {number - 1}", cause)
            yield StoredTree(stage=line.stage, step=line.step, tree=_tree_from_line(line, where))
    if number < expected or not number:
        rows = f"{expected or 'at least 1'}, one per tree"
        raise InputError(str(path), f"{number} lines", rows, _CORRUPT_FILE_CAUSE)


def _parse_line(text: bytes, where: str) -> Any:
    """Parse a line and check its format version and fields."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        whole = "a line" if text.endswith(b"\n") else "half a line"
        got = f"{whole} of {len(text)} bytes that is not JSON ({error})"
        raise InputError(where, got, "one rollout tree", _CORRUPT_FILE_CAUSE) from None
    if not isinstance(line, dict) or "format" not in line:
        got = 'JSON without "format"'
        raise InputError(where, got, "one rollout tree", _CORRUPT_FILE_CAUSE)
    if line["format"] != FORMAT_VERSION:
        cause = "it was written by another version"
        raise InputError(where, f"format {line['format']!r}", str(FORMAT_VERSION), cause)
    return from_builtins(_StoredLine, line, where)


def _tree_to_line(tree: NodeTree) -> dict[str, Any]:
    leaves = [{"last_node": leaf.last_node, **leaf.record_fields} for leaf in tree.leaves]
    nodes = [_pack_node(node) for node in tree.nodes]
    return {"prompt": tree.prompt, "nodes": nodes, "leaves": leaves, **tree.record_fields}


def _tree_from_line(line: Any, where: str) -> NodeTree:
    sizes = [node.stop - node.start for node in line.nodes]
    if min(sizes, default=0) < 0 or sum(sizes) > MAX_TREE_TOKENS:
        expected = f"0 to {MAX_TREE_TOKENS} in all"
        raise InputError(f"{where}: tokens of the nodes", sum(sizes), expected, _CORRUPT_FILE_CAUSE)
    tree = NodeTree(
        prompt=restore_messages(line.prompt),
        nodes=tuple(
            _unpack_node(node, f"{where}.nodes[{index}]") for index, node in enumerate(line.nodes)
        ),
        leaves=tuple(
            _parse_leaf(leaf, f"{where}.leaves[{index}]") for index, leaf in enumerate(line.leaves)
        ),
        record_fields={name: value for name, value in vars(line).items() if name not in _LINE_HEAD},
    )
    with _naming(where):
        for leaf in tree.leaves:
            tree.node_indices(leaf)
    return tree


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Prefix the name in errors of the body by the place in the file."""
    try:
        yield
    except InputError as error:
        name = f"{where}: {error.name}"
        raise InputError(name, error.got, error.expected, error.cause) from None


def _parse_leaf(values: Mapping[str, Any], where: str) -> TreeLeaf:
    record_fields = dict(vars(from_builtins(_StoredLeaf, values, where)))
    return TreeLeaf(last_node=record_fields.pop("last_node"), record_fields=record_fields)


def _pack_node(node: TreeNode) -> _StoredNode:
    return _StoredNode(
        parent=node.parent,
        path=node.path,
        start=node.start,
        stop=node.stop,
        turn=node.turn,
        token_ids=_pack_ints(node.token_ids),
        loss_mask=_pack_ints(node.loss_mask),
        logps=_pack_floats(node.logps),
        entropies=_pack_floats(node.entropies),
        versions=_pack_ints(node.versions),
        argmax_ids=_pack_ints(node.argmax_ids),
    )


def _unpack_node(node: _StoredNode, where: str) -> TreeNode:
    size = node.stop - node.start
    with _naming(where):
        return TreeNode(
            parent=node.parent,
            path=node.path,
            start=node.start,
            turn=node.turn,
            token_ids=_unpack(node.token_ids, size),
            loss_mask=_unpack(node.loss_mask, size),
            logps=_unpack(node.logps, size),
            entropies=_unpack(node.entropies, size),
            versions=_unpack(node.versions, size),
            argmax_ids=_unpack(node.argmax_ids, size),
        )


def _pack_ints(values: Sequence[int]) -> PackedInts:
    return int(values[0]) if len(set(values)) == 1 else [int(value) for value in values]


def _pack_floats(values: Sequence[float]) -> PackedFloats:
    """Return a single value, the shortest float32 numbers, or the numbers unchanged."""
    double_N = np.asarray(values, dtype=np.float64)
    if double_N.size and bool((double_N.view(np.int64) == double_N.view(np.int64)[0]).all()):
        return float(double_N[0])
    with np.errstate(over="ignore"):
        single_N = double_N.astype(np.float32)
    if not _same_bits(single_N.astype(np.float64), double_N):
        return [float(value) for value in values]
    short = [float(str(value)) for value in single_N]
    # Parsed as float64 and then rounded, a number may become the neighbouring float32.
    if not _same_bits(np.asarray(short, dtype=np.float64).astype(np.float32), single_N):
        return [float(value) for value in values]
    return _Float32List(f4=short)


def _same_bits(left_N: np.ndarray[Any, Any], right_N: np.ndarray[Any, Any]) -> bool:
    return left_N.tobytes() == right_N.tobytes()


def _unpack(values: PackedInts | PackedFloats, size: int) -> tuple[Any, ...]:
    """Return the packed values of a field of `size` tokens."""
    if isinstance(values, _Float32List):
        single_N = np.asarray(values.f4, dtype=np.float64).astype(np.float32)
        return tuple(single_N.astype(np.float64).tolist())
    return tuple(values) if isinstance(values, list) else (values,) * size
