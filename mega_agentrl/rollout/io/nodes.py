r"""Rollout trees as nodes: each token is stored once, however many trajectories contain it.

The prompt is the root. A node is a run of tokens of one turn that the same paths contain: a path is
a sequence of whole nodes. A node ends where its turn ends, or where a path leaves the turn::

    prompt - 0 agent - 1 tool - 2 agent - 3 tool - 4 agent      path 0
                            \- 5 agent - 6 agent                path 0.0, forked after node 1
                                      \- 7 agent                path 0.0.0, forked inside a turn

The turn is part of its last node. Nodes 6 and 7 end two turns that begin in node 5.

A leaf names the last node of its path and holds the remaining fields of the trajectory, such as
stop reason, score and decisions. `to_rollout_tree(to_node_tree(tree))` restores the tree exactly,
but for the routes of its tokens.
`tree_file` reads and writes node trees.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from mega_agentrl.errors import InputError
from mega_agentrl.types.records import Prompt, Role, RolloutTree, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

TreePath = tuple[int, ...]

TOKEN_FIELDS = ("token_ids", "loss_mask", "logps", "entropies", "versions")
_PER_TOKEN_FIELDS = (*TOKEN_FIELDS, "argmax_ids")
NODE_FIELDS = frozenset({*TOKEN_FIELDS, "argmax_ids", "prompt", "turn_ids", "turns"})
"""Fields of a trajectory that are restored from its nodes and the tree."""
LEFT_OUT_FIELDS = frozenset({"routes"})
"""Fields of a trajectory that only training needs."""
TREE_FIELDS = frozenset({"prompt", "trajectories"})
"""Fields of a rollout tree that are restored from its leaves and prompt."""


@dataclass(slots=True, kw_only=True, frozen=True)
class TreeNode:
    """A run of tokens of one turn that the same paths contain; its sequences have one length."""

    parent: int | None
    """Index of the node before it; None if the prompt precedes it."""
    path: TreePath
    """The path that produced the tokens first."""
    start: int
    """Number of response tokens before the node."""
    turn: Turn | None
    """The turn that ends with this node; None if it continues in the next nodes."""
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
        size = self.stop - self.start if self.turn is None else self.turn.stop - self.start
        if set(lengths.values()) != {size}:
            part = "part of a turn" if self.turn is None else f"turn {self.turn.index}"
            name = f"node of path {format_path(self.path)}, {part}"
            raise InputError(name, lengths, f"{size} tokens")

    @property
    def stop(self) -> int:
        """One past the last token of the node."""
        return self.start + len(self.token_ids)


@dataclass(slots=True, kw_only=True, frozen=True)
class TreeLeaf:
    """The end of a path."""

    last_node: int | None
    """Index of the last node of the path; None without turns."""
    record_fields: Mapping[str, Any]
    """Fields of the `Trajectory`, by name, that are neither in `NODE_FIELDS` nor left out."""


@dataclass(slots=True, kw_only=True, frozen=True)
class NodeTree:
    """The tree of one prompt as nodes."""

    prompt: Prompt
    nodes: Sequence[TreeNode]
    """Nodes, parents first."""
    leaves: Sequence[TreeLeaf]
    """Leaves in path order."""
    record_fields: Mapping[str, Any]
    """Fields of the `RolloutTree`, by name, that are not in `TREE_FIELDS`."""

    def node_indices(self, leaf: TreeLeaf) -> list[int]:
        """Return the indices of the nodes from the prompt to the leaf."""
        indices: list[int] = []
        index = leaf.last_node
        while index is not None:
            if not 0 <= index < (indices[-1] if indices else len(self.nodes)):
                expected = f"one with a smaller index than {indices[-1:] or len(self.nodes)}"
                raise InputError(f"{self._name_leaf(leaf)}: a node's parent", index, expected)
            indices.append(index)
            index = self.nodes[index].parent
        if indices and self.nodes[indices[0]].turn is None:
            name = f"{self._name_leaf(leaf)}: the last node"
            raise InputError(name, indices[0], "one that ends a turn")
        return indices[::-1]

    def _name_leaf(self, leaf: TreeLeaf) -> str:
        return f"prompt {self.prompt.prompt_id}, path {format_path(leaf.record_fields['path'])}"


def to_node_tree(tree: RolloutTree) -> NodeTree:
    """Convert a rollout tree, whose trajectories must be in path order, to nodes.

    Raises:
        ValueError: The turns of a trajectory do not tile it, a parent is missing, a prefix differs
            from the parent's, or a fork starts inside of a turn that the policy did not write.
    """
    nodes: list[TreeNode] = []
    leaves: list[TreeLeaf] = []
    chains: dict[str, tuple[Trajectory, list[int]]] = {}
    cuts = _fork_positions(tree.trajectories)
    for trajectory in tree.trajectories:
        check_turns(trajectory)
        chain: list[int] = []
        if trajectory.parent_id is not None:
            chain = _shared_prefix_nodes(trajectory, *chains[trajectory.parent_id], nodes)
        num_shared_tokens = nodes[chain[-1]].stop if chain else 0
        for turn in trajectory.turns[_num_complete_turns(nodes, chain) :]:
            begin = max(turn.start, num_shared_tokens)
            inside = sorted(i for i in cuts[trajectory.trajectory_id] if begin < i <= turn.stop)
            for start, stop in pairwise([begin, *inside, turn.stop]):
                tokens = {
                    name: tuple(getattr(trajectory, name)[start:stop]) for name in _PER_TOKEN_FIELDS
                }
                node = TreeNode(
                    parent=chain[-1] if chain else None,
                    path=trajectory.path,
                    start=start,
                    turn=None,
                    **tokens,
                )
                chain.append(len(nodes))
                nodes.append(node)
            nodes[-1] = replace(nodes[-1], turn=turn)
        chains[trajectory.trajectory_id] = (trajectory, chain)
        leaves.append(
            TreeLeaf(
                last_node=chain[-1] if chain else None,
                record_fields=_remaining_fields(trajectory, NODE_FIELDS | LEFT_OUT_FIELDS),
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


def format_path(path: TreePath) -> str:
    """Format a path, for example as ``0.1.0``."""
    return ".".join(map(str, path))


def _build_trajectory(tree: NodeTree, leaf: TreeLeaf) -> Trajectory:
    nodes = [tree.nodes[index] for index in tree.node_indices(leaf)]
    turns = [node.turn for node in nodes if node.turn is not None]
    turn_of_node = accumulate((node.turn is not None for node in nodes), initial=0)
    tokens: dict[str, Any] = {
        name: [value for node in nodes for value in getattr(node, name)] for name in TOKEN_FIELDS
    }
    return Trajectory(
        prompt=tree.prompt,
        turns=turns,
        turn_ids=[
            index for index, node in zip(turn_of_node, nodes, strict=False) for _ in node.token_ids
        ],
        argmax_ids=array("i", (value for node in nodes for value in node.argmax_ids)),
        **tokens,
        **{name: copy(value) for name, value in leaf.record_fields.items()},
    )


def _remaining_fields(record: Trajectory | RolloutTree, excluded: frozenset[str]) -> dict[str, Any]:
    names = [spec.name for spec in fields(record) if spec.name not in excluded]
    return {name: copy(getattr(record, name)) for name in names}


def check_turns(trajectory: Trajectory) -> None:
    """Raise `ValueError` unless the turns of a trajectory tile its tokens."""
    starts = [0, *(turn.stop for turn in trajectory.turns)]
    spans = [(turn.index, turn.start) for turn in trajectory.turns]
    is_tiled = spans == list(enumerate(starts[:-1])) and starts == sorted(starts)
    is_tiled = is_tiled and starts[-1] == len(trajectory.token_ids)
    if not is_tiled or trajectory.turn_ids != [
        turn.index for turn in trajectory.turns for _ in range(turn.start, turn.stop)
    ]:
        raise InputError(
            f"turns of trajectory {trajectory.trajectory_id}",
            f"ends at {starts[1:]} and turn_ids of {len(trajectory.turn_ids)} tokens",
            f"turns that tile all {len(trajectory.token_ids)} tokens",
        )


def _fork_positions(trajectories: Sequence[Trajectory]) -> dict[str, set[int]]:
    """Return, by trajectory id, the positions inside its turns at which other paths fork.

    A position is listed for the trajectory that sampled the tokens around it.
    """
    lineages: dict[str, list[Trajectory]] = {}
    positions: dict[str, set[int]] = {}
    for trajectory in trajectories:
        lineage: list[Trajectory] = []
        if trajectory.parent_id is not None:
            if trajectory.parent_id not in lineages:
                name = f"parent of trajectory {trajectory.trajectory_id}"
                raise InputError(name, trajectory.parent_id, "one that comes earlier in its tree")
            lineage = lineages[trajectory.parent_id]
            if _forks_inside_turn(trajectory, lineage[0]):
                holders = (other for other in lineage if other.fork_len <= trajectory.fork_len)
                positions[next(holders, lineage[-1]).trajectory_id].add(trajectory.fork_len)
        lineages[trajectory.trajectory_id] = [trajectory, *lineage]
        positions[trajectory.trajectory_id] = set()
    return positions


def _forks_inside_turn(trajectory: Trajectory, parent: Trajectory) -> bool:
    """Return whether the turn before the fork is not a whole turn of both paths."""
    size = trajectory.fork_len
    num_turns = sum(turn.start < size for turn in trajectory.turns)
    is_split = any(turn.start < size < turn.stop for turn in trajectory.turns)
    return is_split or trajectory.turns[:num_turns] != parent.turns[:num_turns]


def _num_complete_turns(nodes: Sequence[TreeNode], chain: Sequence[int]) -> int:
    return sum(nodes[index].turn is not None for index in chain)


def _shared_prefix_nodes(
    trajectory: Trajectory, parent: Trajectory, chain: Sequence[int], nodes: Sequence[TreeNode]
) -> list[int]:
    """Return the indices of the parent's nodes that the trajectory shares."""
    size = trajectory.fork_len
    shared = [index for index in chain if nodes[index].stop <= size]
    num_turns = _num_complete_turns(nodes, shared)
    while shared and parent.turns[:num_turns] != trajectory.turns[:num_turns]:
        shared.pop()
        num_turns = _num_complete_turns(nodes, shared)
    is_equal = all(
        getattr(trajectory, name)[:size] == getattr(parent, name)[:size]
        for name in _PER_TOKEN_FIELDS
    )
    is_equal = is_equal and (nodes[shared[-1]].stop if shared else 0) == size
    if is_equal and shared and nodes[shared[-1]].turn is None:
        roles = [record.turns[num_turns].role for record in (trajectory, parent)]
        is_equal = roles == [Role.assistant] * 2
    if not is_equal:
        raise InputError(
            f"first tokens and turns of trajectory {trajectory.trajectory_id}",
            f"others than those of {parent.trajectory_id} up to fork_len={size}",
            "the parent's turns, the last one whole or an assistant's",
        )
    return shared
