r"""Rollout trees as nodes: each turn is stored once, however many trajectories contain it.

The prompt is the root. A node is one turn behind its parent node. Since forks start between two
turns, paths part only at the boundaries of turns::

    prompt - 0 agent - 1 tool - 2 agent - 3 tool - 4 agent      path 0
                            \- 5 agent                          path 0.0, forked behind node 1

A leaf names the last node of its path and holds the remaining fields of the trajectory, such as
stop reason, score and decisions. `to_rollout_tree(to_node_tree(tree))` restores the tree exactly.
`find_token_origin` finds the path that sampled a token and the decision that created this path.
`tree_file` reads and writes node trees.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mega_agentrl.types.records import BranchDecision, Prompt, RolloutTree, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

TreePath = tuple[int, ...]

TOKEN_FIELDS = ("token_ids", "loss_mask", "logps", "entropies", "versions")
_PER_TOKEN_FIELDS = (*TOKEN_FIELDS, "argmax_ids")
NODE_FIELDS = frozenset({*TOKEN_FIELDS, "argmax_ids", "prompt", "turn_ids", "turns"})
"""Fields of a trajectory that are restored from its nodes and the tree."""
TREE_FIELDS = frozenset({"prompt", "trajectories"})
"""Fields of a rollout tree that are restored from its leaves and prompt."""


@dataclass(slots=True, kw_only=True, frozen=True)
class TurnNode:
    """One turn; the token sequences have length `turn.stop - turn.start`."""

    parent: int | None
    """Index of the node before it; None right behind the prompt."""
    path: TreePath
    """The path that produced the turn first."""
    turn: Turn
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logps: tuple[float, ...]
    entropies: tuple[float, ...]
    versions: tuple[int, ...]
    argmax_ids: tuple[int, ...] = ()
    """Empty if they were not recorded."""

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in TOKEN_FIELDS}
        if self.argmax_ids:
            lengths["argmax_ids"] = len(self.argmax_ids)
        size = self.turn.stop - self.turn.start
        if set(lengths.values()) != {size}:
            raise ValueError(
                f"node of path {format_path(self.path)}: its turn {self.turn.index} has {size} "
                f"tokens, got {lengths}"
            )


@dataclass(slots=True, kw_only=True, frozen=True)
class TreeLeaf:
    """The end of a path."""

    last_node: int | None
    """Index of the last node of the path; None without turns."""
    record_fields: Mapping[str, Any]
    """Fields of the `Trajectory`, by name, that are not in `NODE_FIELDS`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class NodeTree:
    """The tree of one prompt as nodes."""

    prompt: Prompt
    nodes: Sequence[TurnNode]
    """Nodes, parents first."""
    leaves: Sequence[TreeLeaf]
    """Leaves in path order."""
    record_fields: Mapping[str, Any]
    """Fields of the `RolloutTree`, by name, that are not in `TREE_FIELDS`."""

    def find_leaf(self, path: TreePath) -> TreeLeaf:
        """Return the leaf of a path; raise `ValueError` if there is none."""
        for leaf in self.leaves:
            if leaf.record_fields["path"] == path:
                return leaf
        paths = ", ".join(format_path(leaf.record_fields["path"]) for leaf in self.leaves)
        raise ValueError(
            f"prompt {self.prompt.prompt_id}: got path {format_path(path)}, has {paths}"
        )

    def node_indices(self, leaf: TreeLeaf) -> list[int]:
        """Return the indices of the nodes from the prompt to the leaf."""
        indices: list[int] = []
        index = leaf.last_node
        while index is not None:
            if not 0 <= index < (indices[-1] if indices else len(self.nodes)):
                path = format_path(leaf.record_fields["path"])
                raise ValueError(
                    f"prompt {self.prompt.prompt_id}, path {path}: got node {index} behind "
                    f"{indices[-1:]}, expected one that comes before it"
                )
            indices.append(index)
            index = self.nodes[index].parent
        return indices[::-1]


@dataclass(slots=True, kw_only=True, frozen=True)
class TokenOrigin:
    """Origin of a sampled token in the tree."""

    node: int
    """Index of the node."""
    offset: int
    """Index of the token in the node."""
    path: TreePath
    """The path that sampled the token."""
    decision: BranchDecision | None
    """Decision that created `path`; None for a root, or if no decisions were recorded."""


def to_node_tree(tree: RolloutTree) -> NodeTree:
    """Convert a rollout tree, whose trajectories must be in path order, to nodes.

    Raises:
        ValueError: The turns of a trajectory do not tile it, a parent is missing, a prefix differs
            from the parent's, or a fork starts inside of a turn.
    """
    nodes: list[TurnNode] = []
    leaves: list[TreeLeaf] = []
    chains: dict[str, tuple[Trajectory, list[int]]] = {}
    for one in tree.trajectories:
        _check_turns(one)
        chain: list[int] = []
        if one.parent_id is not None:
            chain = _shared_prefix_nodes(one, *_find_parent(one, chains))
        for turn in one.turns[len(chain) :]:
            tokens = {n: tuple(getattr(one, n)[turn.start : turn.stop]) for n in _PER_TOKEN_FIELDS}
            parent = chain[-1] if chain else None
            chain.append(len(nodes))
            nodes.append(TurnNode(parent=parent, path=one.path, turn=turn, **tokens))
        chains[one.trajectory_id] = (one, chain)
        leaves.append(
            TreeLeaf(
                last_node=chain[-1] if chain else None,
                record_fields=_remaining_fields(one, NODE_FIELDS),
            )
        )
    record_fields = _remaining_fields(tree, TREE_FIELDS)
    return NodeTree(
        prompt=tree.prompt, nodes=tuple(nodes), leaves=tuple(leaves), record_fields=record_fields
    )


def to_rollout_tree(tree: NodeTree) -> RolloutTree:
    """Restore the rollout tree from its nodes."""
    trajectories = [_build_trajectory(tree, leaf) for leaf in tree.leaves]
    return RolloutTree(prompt=tree.prompt, trajectories=trajectories, **tree.record_fields)


def find_token_origin(tree: NodeTree, path: TreePath, position: int) -> TokenOrigin:
    """Return where the response token at `position` of a path was sampled."""
    for index in tree.node_indices(tree.find_leaf(path)):
        node = tree.nodes[index]
        if node.turn.start <= position < node.turn.stop:
            return TokenOrigin(
                node=index,
                offset=position - node.turn.start,
                path=node.path,
                decision=find_fork_decision(tree, node.path),
            )
    raise ValueError(
        f"prompt {tree.prompt.prompt_id}, path {format_path(path)}: got position {position}, "
        "which is outside of its response"
    )


def find_fork_decision(tree: NodeTree, path: TreePath) -> BranchDecision | None:
    """Return the decision that created `path`; None for a root."""
    if tree.find_leaf(path).record_fields["parent_id"] is None:
        return None
    decisions: list[BranchDecision] = tree.find_leaf(path[:-1]).record_fields["decisions"]
    totals = accumulate(decision.num_forks for decision in decisions)
    made = (one for one, total in zip(decisions, totals, strict=True) if total > path[-1])
    return next(made, None)


def format_path(path: TreePath) -> str:
    """Format a path, for example as ``0.1.0``."""
    return ".".join(map(str, path))


def _build_trajectory(tree: NodeTree, leaf: TreeLeaf) -> Trajectory:
    nodes = [tree.nodes[index] for index in tree.node_indices(leaf)]
    tokens: dict[str, Any] = {
        name: [value for node in nodes for value in getattr(node, name)] for name in TOKEN_FIELDS
    }
    return Trajectory(
        prompt=tree.prompt,
        turns=[node.turn for node in nodes],
        turn_ids=[node.turn.index for node in nodes for _ in node.token_ids],
        argmax_ids=array("i", (value for node in nodes for value in node.argmax_ids)),
        **tokens,
        **{name: copy(value) for name, value in leaf.record_fields.items()},
    )


def _remaining_fields(
    record: Trajectory | RolloutTree, elsewhere: frozenset[str]
) -> dict[str, Any]:
    names = [spec.name for spec in fields(record) if spec.name not in elsewhere]
    return {name: copy(getattr(record, name)) for name in names}


def _check_turns(one: Trajectory) -> None:
    starts = [0, *(turn.stop for turn in one.turns)]
    spans = [(turn.index, turn.start) for turn in one.turns]
    ids = [turn.index for turn in one.turns for _ in range(turn.start, turn.stop)]
    tiled = spans == list(enumerate(starts[:-1])) and starts[-1] == len(one.token_ids)
    if not tiled or ids != one.turn_ids:
        raise ValueError(
            f"trajectory {one.trajectory_id}: got turns that end at {starts[1:]} and turn_ids of "
            f"{len(one.turn_ids)} tokens, expected turns that tile all {len(one.token_ids)} tokens"
        )


def _find_parent(
    one: Trajectory, chains: Mapping[str, tuple[Trajectory, list[int]]]
) -> tuple[Trajectory, list[int]]:
    if one.parent_id is None or one.parent_id not in chains:
        raise ValueError(
            f"trajectory {one.trajectory_id}: got the parent {one.parent_id}, expected one that "
            "comes earlier in its tree"
        )
    return chains[one.parent_id]


def _shared_prefix_nodes(one: Trajectory, parent: Trajectory, chain: list[int]) -> list[int]:
    """Return the indices of the parent's nodes that `one` shares."""
    size = one.fork_len
    ends = [turn.stop for turn in one.turns if turn.stop <= size]
    num_turns = len(ends)
    while num_turns and parent.turns[:num_turns] != one.turns[:num_turns]:
        num_turns -= 1
    same = all(getattr(one, n)[:size] == getattr(parent, n)[:size] for n in _PER_TOKEN_FIELDS)
    if not same or (ends[num_turns - 1] if num_turns else 0) != size:
        raise ValueError(
            f"trajectory {one.trajectory_id}: its first {size} tokens and their turns are not "
            f"those of {parent.trajectory_id}, or a turn goes on behind them; expected the "
            f"parent's whole turns up to fork_len={size}"
        )
    return chain[:num_turns]
