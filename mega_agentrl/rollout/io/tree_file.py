"""Files of rollout trees, in JSON lines with one tree per line.

Each line is self-contained::

    {"format": 2, "stage": "rl", "step": 20, "index": 0, "num_trees": 32, "prompt": {...},
     "num_forks": 3, "nodes": [{"parent": null, "path": [0], "turn": {...}, "token_ids": [...],
     "loss_mask": 1, "logps": {"f4": [...]}, ...}, ...], "leaves": [{"last": 4, ...}, ...]}

A node that is a part of a turn, because a path leaves the turn inside, also has ``start`` and
``stop``, and its ``turn`` is null if the turn goes on in the nodes behind it.

A token field with a single value throughout is stored as that value. Floats that are exact in
float32 are written with the digits that float32 needs, under ``f4``; others with full precision.
Every number is restored exactly. Files are written under a temporary name and renamed when they are
complete: a crash loses only the step being written, and a reader never sees a partial file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mega_agentrl.rollout.io.nodes import (
    NODE_FIELDS,
    TREE_FIELDS,
    NodeTree,
    TreeLeaf,
    TreeNode,
    to_node_tree,
)
from mega_agentrl.rollout.io.record_json import from_json, parse_record_fields, to_json
from mega_agentrl.types.records import Prompt, RolloutTree, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FORMAT_VERSION = 2
INT_FIELDS = ("token_ids", "loss_mask", "versions")
FLOAT_FIELDS = ("logps", "entropies")
_REQUIRED_KEYS = frozenset(
    {"format", "stage", "step", "index", "num_trees", "prompt", "nodes", "leaves"}
)
_INT_TYPES, _FLOAT_TYPES = frozenset({int}), frozenset({int, float})
CORRUPT_FILE_HINT = "is it another program's file, or a copy that was cut?"


@dataclass(slots=True, kw_only=True, frozen=True)
class StoredTree:
    """A tree and the step it was sampled in."""

    stage: str
    """Stage of the run, such as `rl` or `held_out_before`."""
    step: int
    """Step within the stage."""
    tree: NodeTree


def write_trees(path: Path, trees: Sequence[RolloutTree], *, stage: str, step: int) -> None:
    """Write all trees of one step, replacing an existing file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for index, tree in enumerate(trees):
            head = {"format": FORMAT_VERSION, "stage": stage, "step": step}
            head |= {"index": index, "num_trees": len(trees)}
            line = head | _tree_to_json(to_node_tree(tree))
            # Escaped, because a tool answer may hold a lone surrogate, which is not valid UTF-8.
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


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
            expected = line["num_trees"]
            if line["index"] != number - 1 or number > expected:
                raise ValueError(
                    f"{where}: got tree {line['index']} of {expected}, expected tree "
                    f"{number - 1}; are there lines missing, or two files in one?"
                )
            yield StoredTree(
                stage=line["stage"], step=line["step"], tree=_tree_from_json(line, where)
            )
    if number < expected or not number:
        raise ValueError(
            f"{path}: got {number} lines, expected {expected or 'at least 1'}, one per tree; "
            f"{CORRUPT_FILE_HINT}"
        )


def _parse_line(text: bytes, where: str) -> dict[str, Any]:
    """Parse a line and check its format version and required keys."""
    try:
        line = json.loads(text)
    except ValueError as error:
        whole = "a line" if text.endswith(b"\n") else "half a line"
        raise ValueError(
            f"{where}: got {whole} of {len(text)} bytes that is no JSON ({error}), expected one "
            f"rollout tree; {CORRUPT_FILE_HINT}"
        ) from None
    if not isinstance(line, dict) or "format" not in line:
        raise ValueError(
            f'{where}: got JSON without "format", expected one rollout tree; {CORRUPT_FILE_HINT}'
        )
    if line["format"] != FORMAT_VERSION:
        raise ValueError(
            f"{where}: got format {line['format']!r}, expected {FORMAT_VERSION}; was it written by "
            "another version?"
        )
    if not line.keys() >= _REQUIRED_KEYS:
        raise ValueError(
            f"{where}: expected the keys {', '.join(sorted(_REQUIRED_KEYS - line.keys()))}; "
            f"{CORRUPT_FILE_HINT}"
        )
    return line


def _tree_to_json(tree: NodeTree) -> dict[str, Any]:
    return {
        **_fields_to_json(tree.record_fields),
        "prompt": to_json(tree.prompt),
        "nodes": [_node_to_json(node) for node in tree.nodes],
        "leaves": [
            {"last": leaf.last_node, **_fields_to_json(leaf.record_fields)} for leaf in tree.leaves
        ],
    }


def _fields_to_json(record_fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_json(value) for name, value in record_fields.items()}


def _tree_from_json(line: Mapping[str, Any], where: str) -> NodeTree:
    record_fields = {name: value for name, value in line.items() if name not in _REQUIRED_KEYS}
    nodes = from_json(list[dict[str, Any]], line["nodes"], f"{where}.nodes")
    leaves = from_json(list[dict[str, Any]], line["leaves"], f"{where}.leaves")
    tree = NodeTree(
        prompt=from_json(Prompt, line["prompt"], f"{where}.prompt"),
        nodes=tuple(
            _node_from_json(node, f"{where}.nodes[{index}]") for index, node in enumerate(nodes)
        ),
        leaves=tuple(
            _leaf_from_json(leaf, f"{where}.leaves[{index}]") for index, leaf in enumerate(leaves)
        ),
        record_fields=parse_record_fields(RolloutTree, record_fields, where, given=TREE_FIELDS),
    )
    try:
        for leaf in tree.leaves:
            tree.node_indices(leaf)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return tree


def _leaf_from_json(value: Mapping[str, Any], where: str) -> TreeLeaf:
    record_fields = {name: item for name, item in value.items() if name != "last"}
    return TreeLeaf(
        last_node=from_json(int | None, value.get("last"), f"{where}.last"),
        record_fields=parse_record_fields(Trajectory, record_fields, where, given=NODE_FIELDS),
    )


def _node_to_json(node: TreeNode) -> dict[str, Any]:
    is_part = node.turn is None or node.start > node.turn.start
    return {
        "parent": node.parent,
        "path": list(node.path),
        **({"start": node.start, "stop": node.stop} if is_part else {}),
        "turn": None if node.turn is None else to_json(node.turn),
        **{name: _pack_ints(getattr(node, name)) for name in INT_FIELDS},
        **{name: _pack_floats(getattr(node, name)) for name in FLOAT_FIELDS},
        **({"argmax_ids": _pack_ints(node.argmax_ids)} if node.argmax_ids else {}),
    }


def _node_from_json(value: Mapping[str, Any], where: str) -> TreeNode:
    turn, start, stop = _turn_and_span_from_json(value, where)
    size = stop - start
    ints = {
        name: _unpack_numbers(value.get(name), size, _INT_TYPES, f"{where}.{name}")
        for name in INT_FIELDS
    }
    # Older files have no argmax_ids.
    if "argmax_ids" in value:
        ints["argmax_ids"] = _unpack_numbers(
            value["argmax_ids"], size, _INT_TYPES, f"{where}.argmax_ids"
        )
    floats = {
        name: _unpack_numbers(value.get(name), size, _FLOAT_TYPES, f"{where}.{name}")
        for name in FLOAT_FIELDS
    }
    try:
        return TreeNode(
            parent=from_json(int | None, value.get("parent"), f"{where}.parent"),
            path=from_json(tuple[int, ...], value.get("path"), f"{where}.path"),
            start=start,
            turn=turn,
            **ints,
            **floats,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _turn_and_span_from_json(value: Mapping[str, Any], where: str) -> tuple[Turn | None, int, int]:
    """Return the turn that ends with a node, and the first token of the node and one past it."""
    if "start" not in value:
        turn = from_json(Turn, value.get("turn"), f"{where}.turn")
        return turn, turn.start, turn.stop
    part = from_json(Turn | None, value.get("turn"), f"{where}.turn")
    start = from_json(int, value["start"], f"{where}.start")
    return part, start, from_json(int, value.get("stop"), f"{where}.stop")


def _pack_ints(values: Sequence[int]) -> int | list[int]:
    return int(values[0]) if len(set(values)) == 1 else [int(value) for value in values]


def _pack_floats(values: Sequence[float]) -> float | list[float] | dict[str, list[float]]:
    """Return a single value, shortest float32 numbers under ``f4``, or the numbers unchanged."""
    given_N = np.asarray(values, dtype=np.float64)
    if given_N.size and bool((given_N.view(np.int64) == given_N.view(np.int64)[0]).all()):
        return float(given_N[0])
    with np.errstate(over="ignore"):
        single_N = given_N.astype(np.float32)
    if not _same_bits(single_N.astype(np.float64), given_N):
        return [float(value) for value in values]
    short = [float(str(value)) for value in single_N]
    # Parsed as float64 and then rounded, a number may become the neighbouring float32.
    if not _same_bits(np.asarray(short, dtype=np.float64).astype(np.float32), single_N):
        return [float(value) for value in values]
    return {"f4": short}


def _same_bits(one_N: np.ndarray[Any, Any], other_N: np.ndarray[Any, Any]) -> bool:
    return one_N.tobytes() == other_N.tobytes()


def _unpack_numbers(value: Any, size: int, kinds: frozenset[type], where: str) -> tuple[Any, ...]:
    if isinstance(value, dict) and value.keys() == {"f4"}:
        values = _check_numbers(value["f4"], kinds, where)
        single_N = np.asarray(values, dtype=np.float64).astype(np.float32)
        return tuple(single_N.astype(np.float64).tolist())
    if isinstance(value, list):
        return tuple(_check_numbers(value, kinds, where))
    return tuple(_check_numbers([value], kinds, where)) * size


def _check_numbers(values: Any, kinds: frozenset[type], where: str) -> list[Any]:
    if not isinstance(values, list) or not set(map(type, values)) <= kinds:
        wanted = " or ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"{where}: got something else than numbers, expected {wanted}")
    return values
