"""A rollout tree as nodes: every turn once, however many trajectories run through it.

The prompt is the root. A node is one turn of one author behind its parent node; forks start
between two turns, so turn borders are the only places where paths part::

    prompt - 0 agent - 1 tool - 2 agent - 3 tool - 4 agent      path 0
                            \\- 5 agent                          path 0.0, forked behind node 1

A leaf names the last node of its path and holds what is no token: stop reason, score, the
decisions it took. `to_tree(to_nodes(tree))` is the tree again, bit for bit, and `origin_of`
leads from a token to the path that wrote it and the decision that made that path a fork.
Files are `tree_file`'s business.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mega_agentrl.types.records import Decision, Prompt, RolloutTree, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

Path = tuple[int, ...]

TOKEN_FIELDS = ("token_ids", "loss_mask", "logps", "entropies", "versions")
_PER_TOKEN = (*TOKEN_FIELDS, "argmax_ids")
IN_NODES = frozenset({*TOKEN_FIELDS, "argmax_ids", "prompt", "turn_ids", "turns"})
"""Fields of a trajectory that its nodes and the tree give back."""
IN_LEAVES = frozenset({"prompt", "trajectories"})
"""Fields of a rollout tree that its leaves and its prompt give back."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Node:
    """One turn; the token sequences have length `turn.stop - turn.start`.

    parent: index of the node before it, None behind the prompt. path: who wrote it.
    argmax_ids: empty where nobody kept them.
    """

    parent: int | None
    path: Path
    turn: Turn
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logps: tuple[float, ...]
    entropies: tuple[float, ...]
    versions: tuple[int, ...]
    argmax_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in TOKEN_FIELDS}
        if self.argmax_ids:
            lengths["argmax_ids"] = len(self.argmax_ids)
        size = self.turn.stop - self.turn.start
        if set(lengths.values()) != {size}:
            raise ValueError(
                f"node of path {shown(self.path)}: its turn {self.turn.index} has {size} tokens, "
                f"got {lengths}"
            )


@dataclass(slots=True, kw_only=True, frozen=True)
class Leaf:
    """Where a path ended. last: its last node, None where it has no turn.

    facts: the fields of its `Trajectory`, by name, that no node holds.
    """

    last: int | None
    facts: Mapping[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class NodeTree:
    """The tree of one prompt. nodes: parents first. leaves: in path order.

    facts: the fields of its `RolloutTree`, by name, other than prompt and trajectories.
    """

    prompt: Prompt
    nodes: Sequence[Node]
    leaves: Sequence[Leaf]
    facts: Mapping[str, Any]

    def leaf(self, path: Path) -> Leaf:
        """The leaf of a path; `ValueError` where there is none."""
        for leaf in self.leaves:
            if leaf.facts["path"] == path:
                return leaf
        paths = ", ".join(shown(leaf.facts["path"]) for leaf in self.leaves)
        raise ValueError(f"prompt {self.prompt.prompt_id}: got path {shown(path)}, has {paths}")

    def chain(self, leaf: Leaf) -> list[int]:
        """Indices of the nodes from the prompt to the leaf."""
        found: list[int] = []
        at = leaf.last
        while at is not None:
            if not 0 <= at < (found[-1] if found else len(self.nodes)):
                raise ValueError(
                    f"prompt {self.prompt.prompt_id}, path {shown(leaf.facts['path'])}: got node "
                    f"{at} behind {found[-1:]}, expected one that comes before it"
                )
            found.append(at)
            at = self.nodes[at].parent
        return found[::-1]


@dataclass(slots=True, kw_only=True, frozen=True)
class TokenOrigin:
    """Where a token comes from: offset in a node, and the decision that made `path` a fork.

    decision: None where the path is a root, or where its parent kept no decisions.
    """

    node: int
    offset: int
    path: Path
    decision: Decision | None


def to_nodes(tree: RolloutTree) -> NodeTree:
    """The tree as nodes; trajectories with parents first.

    Raises `ValueError` for turns that do not tile a trajectory, a parent that is missing, a
    prefix that is not the parent's and a fork inside a turn.
    """
    nodes: list[Node] = []
    leaves: list[Leaf] = []
    chains: dict[str, tuple[Trajectory, list[int]]] = {}
    for one in tree.trajectories:
        _check_turns(one)
        chain: list[int] = []
        if one.parent_id is not None:
            chain = _shared(one, *_parent(one, chains))
        for turn in one.turns[len(chain) :]:
            tokens = {n: tuple(getattr(one, n)[turn.start : turn.stop]) for n in _PER_TOKEN}
            parent = chain[-1] if chain else None
            chain.append(len(nodes))
            nodes.append(Node(parent=parent, path=one.path, turn=turn, **tokens))
        chains[one.trajectory_id] = (one, chain)
        leaves.append(Leaf(last=chain[-1] if chain else None, facts=_facts(one, IN_NODES)))
    facts = _facts(tree, IN_LEAVES)
    return NodeTree(prompt=tree.prompt, nodes=tuple(nodes), leaves=tuple(leaves), facts=facts)


def to_tree(tree: NodeTree) -> RolloutTree:
    """The rollout tree the nodes were made from."""
    trajectories = [_trajectory(tree, leaf) for leaf in tree.leaves]
    return RolloutTree(prompt=tree.prompt, trajectories=trajectories, **tree.facts)


def origin_of(tree: NodeTree, path: Path, position: int) -> TokenOrigin:
    """Where the response token at `position` of a path comes from."""
    for index in tree.chain(tree.leaf(path)):
        node = tree.nodes[index]
        if node.turn.start <= position < node.turn.stop:
            return TokenOrigin(
                node=index,
                offset=position - node.turn.start,
                path=node.path,
                decision=decision_behind(tree, node.path),
            )
    raise ValueError(
        f"prompt {tree.prompt.prompt_id}, path {shown(path)}: got position {position}, "
        "which is outside of its response"
    )


def decision_behind(tree: NodeTree, path: Path) -> Decision | None:
    """The decision that made `path` a fork; None of a root."""
    if tree.leaf(path).facts["parent_id"] is None:
        return None
    decisions: list[Decision] = tree.leaf(path[:-1]).facts["decisions"]
    totals = accumulate(decision.num_forks for decision in decisions)
    made = (one for one, total in zip(decisions, totals, strict=True) if total > path[-1])
    return next(made, None)


def shown(path: Path) -> str:
    """A path as people read it: ``0.1.0``."""
    return ".".join(map(str, path))


def _trajectory(tree: NodeTree, leaf: Leaf) -> Trajectory:
    nodes = [tree.nodes[index] for index in tree.chain(leaf)]
    tokens: dict[str, Any] = {
        name: [value for node in nodes for value in getattr(node, name)] for name in TOKEN_FIELDS
    }
    return Trajectory(
        prompt=tree.prompt,
        turns=[node.turn for node in nodes],
        turn_ids=[node.turn.index for node in nodes for _ in node.token_ids],
        argmax_ids=array("i", (value for node in nodes for value in node.argmax_ids)),
        **tokens,
        **{name: copy(value) for name, value in leaf.facts.items()},
    )


def _facts(record: Trajectory | RolloutTree, elsewhere: frozenset[str]) -> dict[str, Any]:
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


def _parent(
    one: Trajectory, chains: Mapping[str, tuple[Trajectory, list[int]]]
) -> tuple[Trajectory, list[int]]:
    if one.parent_id is None or one.parent_id not in chains:
        raise ValueError(
            f"trajectory {one.trajectory_id}: got the parent {one.parent_id}, expected one that "
            "comes earlier in its tree"
        )
    return chains[one.parent_id]


def _shared(one: Trajectory, parent: Trajectory, chain: list[int]) -> list[int]:
    """The parent's nodes that `one` runs through."""
    size = one.fork_len
    ends = [turn.stop for turn in one.turns if turn.stop <= size]
    num_turns = len(ends)
    while num_turns and parent.turns[:num_turns] != one.turns[:num_turns]:
        num_turns -= 1
    same = all(getattr(one, n)[:size] == getattr(parent, n)[:size] for n in _PER_TOKEN)
    if not same or (ends[num_turns - 1] if num_turns else 0) != size:
        raise ValueError(
            f"trajectory {one.trajectory_id}: its first {size} tokens and their turns are not "
            f"those of {parent.trajectory_id}, or a turn goes on behind them; expected the "
            f"parent's whole turns up to fork_len={size}"
        )
    return chain[:num_turns]
