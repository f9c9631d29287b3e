"""Rollout trees in a file of JSON lines, one tree a line, and back.

A line says what it is, so that it can be read alone::

    {"format": 1, "stage": "rl", "step": 20, "index": 0, "num_trees": 32, "prompt": {...},
     "num_forks": 3, "nodes": [{"parent": null, "path": [0], "turn": {...}, "token_ids": [...],
     "loss_mask": 1, "logps": {"f4": [...]}, ...}, ...], "leaves": [{"last": 4, ...}, ...]}

A token field that is one value throughout is that value alone. Floats that are float32 are
written with the digits that float32 needs, under ``f4``; others with all of theirs. Every
number comes back bit for bit. A file appears under its name when it is whole (temporary name,
then rename): a crash loses the step being written, never one before it, and a reader never
sees a part. Which steps are written is `train.rollout_files`' business.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mega_agentrl.rollout.nodes import IN_LEAVES, IN_NODES, Leaf, Node, NodeTree, to_nodes
from mega_agentrl.rollout.record_json import from_json, record_fields, to_json
from mega_agentrl.types.records import Prompt, RolloutTree, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FORMAT = 1
INT_FIELDS = ("token_ids", "loss_mask", "versions")
FLOAT_FIELDS = ("logps", "entropies")
_KEYS = frozenset({"format", "stage", "step", "index", "num_trees", "prompt", "nodes", "leaves"})
_INT, _FLOAT = frozenset({int}), frozenset({int, float})
PROBABLE_CAUSE = "is it another program's file, or a copy that was cut?"


@dataclass(slots=True, kw_only=True, frozen=True)
class StoredTree:
    """A tree and where it was grown. stage: "rl", "held_out_before", ...; step: of that stage."""

    stage: str
    step: int
    tree: NodeTree


def write_trees(path: Path, trees: Sequence[RolloutTree], *, stage: str, step: int) -> None:
    """Write all trees of one step; a file of that name is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for index, tree in enumerate(trees):
            head = {"format": FORMAT, "stage": stage, "step": step}
            head |= {"index": index, "num_trees": len(trees)}
            line = head | _tree_to_json(to_nodes(tree))
            # Escaped: a tool's answer may hold half a surrogate pair, which is no UTF-8.
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_trees(path: Path) -> Iterator[StoredTree]:
    """The trees of a file in order, one after another.

    Raises `ValueError` that names file and line for anything but a whole file of this format;
    trees before that line have been given out by then.
    """
    number, expected = 0, 0
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            where = f"{path}:{number}"
            line = _line(text, where)
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
            f"{PROBABLE_CAUSE}"
        )


def _line(text: bytes, where: str) -> dict[str, Any]:
    """The object of a line, of the right format and with the keys all lines have."""
    try:
        line = json.loads(text)
    except ValueError as error:
        whole = "a line" if text.endswith(b"\n") else "half a line"
        raise ValueError(
            f"{where}: got {whole} of {len(text)} bytes that is no JSON ({error}), expected one "
            f"rollout tree; {PROBABLE_CAUSE}"
        ) from None
    if not isinstance(line, dict) or "format" not in line:
        raise ValueError(
            f'{where}: got JSON without "format", expected one rollout tree; {PROBABLE_CAUSE}'
        )
    if line["format"] != FORMAT:
        raise ValueError(
            f"{where}: got format {line['format']!r}, expected {FORMAT}; was it written by "
            "another version?"
        )
    if not line.keys() >= _KEYS:
        raise ValueError(
            f"{where}: expected the keys {', '.join(sorted(_KEYS - line.keys()))}; {PROBABLE_CAUSE}"
        )
    return line


def _tree_to_json(tree: NodeTree) -> dict[str, Any]:
    return {
        **_facts_to_json(tree.facts),
        "prompt": to_json(tree.prompt),
        "nodes": [_node_to_json(node) for node in tree.nodes],
        "leaves": [{"last": leaf.last, **_facts_to_json(leaf.facts)} for leaf in tree.leaves],
    }


def _facts_to_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_json(value) for name, value in facts.items()}


def _tree_from_json(line: Mapping[str, Any], where: str) -> NodeTree:
    facts = {name: value for name, value in line.items() if name not in _KEYS}
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
        facts=record_fields(RolloutTree, facts, where, given=IN_LEAVES),
    )
    try:
        for leaf in tree.leaves:
            tree.chain(leaf)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return tree


def _leaf_from_json(value: Mapping[str, Any], where: str) -> Leaf:
    facts = {name: item for name, item in value.items() if name != "last"}
    return Leaf(
        last=from_json(int | None, value.get("last"), f"{where}.last"),
        facts=record_fields(Trajectory, facts, where, given=IN_NODES),
    )


def _node_to_json(node: Node) -> dict[str, Any]:
    return {
        "parent": node.parent,
        "path": list(node.path),
        "turn": to_json(node.turn),
        **{name: _pack_ints(getattr(node, name)) for name in INT_FIELDS},
        **{name: _pack_floats(getattr(node, name)) for name in FLOAT_FIELDS},
        **({"argmax_ids": _pack_ints(node.argmax_ids)} if node.argmax_ids else {}),
    }


def _node_from_json(value: Mapping[str, Any], where: str) -> Node:
    turn = from_json(Turn, value.get("turn"), f"{where}.turn")
    size = turn.stop - turn.start
    ints = {name: _unpack(value.get(name), size, _INT, f"{where}.{name}") for name in INT_FIELDS}
    # Older files have none.
    if "argmax_ids" in value:
        ints["argmax_ids"] = _unpack(value["argmax_ids"], size, _INT, f"{where}.argmax_ids")
    floats = {
        name: _unpack(value.get(name), size, _FLOAT, f"{where}.{name}") for name in FLOAT_FIELDS
    }
    try:
        return Node(
            parent=from_json(int | None, value.get("parent"), f"{where}.parent"),
            path=from_json(tuple[int, ...], value.get("path"), f"{where}.path"),
            turn=turn,
            **ints,
            **floats,
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _pack_ints(values: Sequence[int]) -> int | list[int]:
    return int(values[0]) if len(set(values)) == 1 else [int(value) for value in values]


def _pack_floats(values: Sequence[float]) -> float | list[float] | dict[str, list[float]]:
    """One value, the shortest float32 numbers under ``f4``, or the numbers as they are."""
    given_N = np.asarray(values, dtype=np.float64)
    if given_N.size and bool((given_N.view(np.int64) == given_N.view(np.int64)[0]).all()):
        return float(given_N[0])
    with np.errstate(over="ignore"):
        single_N = given_N.astype(np.float32)
    if not _same_bits(single_N.astype(np.float64), given_N):
        return [float(value) for value in values]
    short = [float(str(value)) for value in single_N]
    # Read as float64 first, a number next to the middle of two float32 may round to the other.
    if not _same_bits(np.asarray(short, dtype=np.float64).astype(np.float32), single_N):
        return [float(value) for value in values]
    return {"f4": short}


def _same_bits(one_N: np.ndarray[Any, Any], other_N: np.ndarray[Any, Any]) -> bool:
    return one_N.tobytes() == other_N.tobytes()


def _unpack(value: Any, size: int, kinds: frozenset[type], where: str) -> tuple[Any, ...]:
    if isinstance(value, dict) and value.keys() == {"f4"}:
        values = _numbers(value["f4"], kinds, where)
        single_N = np.asarray(values, dtype=np.float64).astype(np.float32)
        return tuple(single_N.astype(np.float64).tolist())
    if isinstance(value, list):
        return tuple(_numbers(value, kinds, where))
    return tuple(_numbers([value], kinds, where)) * size


def _numbers(values: Any, kinds: frozenset[type], where: str) -> list[Any]:
    if not isinstance(values, list) or not set(map(type, values)) <= kinds:
        wanted = " or ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"{where}: got something else than numbers, expected {wanted}")
    return values
