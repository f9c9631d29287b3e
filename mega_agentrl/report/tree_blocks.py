"""The trees on the page: each a block of data of its own, and the list that leads to them.

A block is read by the browser when its tree is chosen, so that a page of thousands of
trajectories opens at once. The list has what the viewer needs to choose: prompts, rewards of
the paths as marks, numbers of forks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mega_agentrl.report.markup import Markup, data_block, script_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

QUESTION_CHARS = 120
COLOUR_PERCENTILE = 0.99
LEAST_ENTROPY = 0.1


@dataclass(slots=True, kw_only=True, frozen=True)
class TreeBlock:
    """One tree. index: its number in the file. entry: its line in the list. data: as JSON."""

    index: int
    entry: Mapping[str, Any]
    data: str

    @property
    def num_bytes(self) -> int:
        """On the page; it is pure ASCII."""
        return len(self.data)


@dataclass(slots=True, kw_only=True, frozen=True)
class TreeShelf:
    """The trees of one file. key: how the page's address names it. num_trees: in the file."""

    key: str
    label: str
    num_trees: int
    blocks: Sequence[TreeBlock]


def tree_block(index: int, view: Mapping[str, Any]) -> TreeBlock:
    """A tree as `tree_view` gives it."""
    paths = view["paths"]
    rewards = [
        path["reward"]
        for path in paths
        if path["reward"] is not None and math.isfinite(path["reward"])
    ]
    question = view["question"][-1]["text"] if view["question"] else ""
    entry = {
        "index": index,
        "id": view["id"],
        "source": view["source"],
        "asks": question[:QUESTION_CHARS],
        "marks": "".join(map(_mark, paths)),
        "forks": view["forks"],
        "reward": fmean(rewards) if rewards else 0.0,
    }
    return TreeBlock(index=index, entry=entry, data=script_json(view))


def _mark(path: Mapping[str, Any]) -> str:
    """g: correct, p: some reward, b: none, v: failed or not scored."""
    if path["failed"] or path["reward"] is None:
        return "v"
    if path["correct"]:
        return "g"
    return "p" if path["reward"] > 0 else "b"


def colour_end(entropies: Sequence[float]) -> float:
    """The entropy at which colours end, nats: nearly all tokens lie below."""
    if not entropies:
        return 1.0
    ordered = sorted(entropies)
    return max(LEAST_ENTROPY, ordered[int(COLOUR_PERCENTILE * (len(ordered) - 1))])


def blocks_markup(shelves: Sequence[TreeShelf], most_entropy: float) -> Markup:
    """All blocks, then the list; nothing where there is no tree."""
    parts: list[str] = []
    files = []
    for shelf in shelves:
        if not shelf.blocks:
            continue
        entries = []
        for block in shelf.blocks:
            number = len(parts)
            opening = f'<script type="application/json" id="tree-{number}">'
            parts.append(f"{opening}{block.data}</script>")
            entries.append({**block.entry, "block": number})
        files.append(
            {"key": shelf.key, "label": shelf.label, "total": shelf.num_trees, "trees": entries}
        )
    trained = [file["key"] for file in files if str(file["key"]).startswith("step_")]
    start = trained[-1] if trained else files[-1]["key"] if files else ""
    index = data_block("tree-index", {"most": most_entropy, "start": start, "files": files})
    return Markup("\n".join([*parts, index]))
