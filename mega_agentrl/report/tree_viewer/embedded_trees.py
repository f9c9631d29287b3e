"""Embed rollout trees in the report page as one JSON block each, with an index.

The browser parses a block only when its tree is selected, so that a page with thousands of
trajectories opens quickly. The index has what the viewer lists: prompts, rewards of the paths as
marks, numbers of forks.

If not all trees fit, some are selected evenly over the files and within each file. Every file (a
step) gets an equal part of the byte budget; files pass on what they do not need. If the parts are
too small for a few trees each, files are skipped evenly, except for the first and the last. The
size of a file is the number of bytes of all its trees on the page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from mega_agentrl.report.page.html import json_for_script, json_script_element

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_QUESTION_CHARS = 120
COLOUR_PERCENTILE = 0.99
MIN_COLOUR_ENTROPY = 0.1
MIN_TREES_PER_FILE = 4
"""Number of trees that each file should show; otherwise fewer files are shown."""


@dataclass(slots=True, kw_only=True, frozen=True)
class EmbeddedTree:
    """A tree on the page."""

    index: int
    """Number of the tree in its file."""
    index_entry: Mapping[str, Any]
    json_text: str

    @property
    def num_bytes(self) -> int:
        """Size on the page; the JSON is ASCII."""
        return len(self.json_text)


@dataclass(slots=True, kw_only=True, frozen=True)
class TreeFileView:
    """The trees of a file."""

    key: str
    """Key of the file in the page's URL."""
    label: str
    """Label in the list."""
    num_trees: int
    trees: Sequence[EmbeddedTree]
    """Trees on the page."""


def embed_tree(index: int, view: Mapping[str, Any]) -> EmbeddedTree:
    """Return tree number `index` of a file for the page; `view` is from `tree_to_json`."""
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
        "asks": question[:MAX_QUESTION_CHARS],
        "marks": "".join(map(_reward_letter, paths)),
        "forks": view["forks"],
        "reward": fmean(rewards) if rewards else 0.0,
    }
    return EmbeddedTree(index=index, index_entry=entry, json_text=json_for_script(view))


def _reward_letter(path: Mapping[str, Any]) -> str:
    """Return g (correct), p (positive reward), b (no reward) or v (failed or not scored)."""
    if path["failed"] or path["reward"] is None:
        return "v"
    if path["correct"]:
        return "g"
    return "p" if path["reward"] > 0 else "b"


def max_colour_entropy(entropies: Sequence[float]) -> float:
    """Return the entropy in nats at which the colour scale ends, a high percentile."""
    if not entropies:
        return 1.0
    ordered = sorted(entropies)
    return max(MIN_COLOUR_ENTROPY, ordered[int(COLOUR_PERCENTILE * (len(ordered) - 1))])


def render_embedded_trees(tree_files: Sequence[TreeFileView], max_entropy: float) -> Markup:
    """Render all blocks, followed by the index."""
    blocks: list[Markup] = []
    files = []
    for tree_file in tree_files:
        if not tree_file.trees:
            continue
        entries = []
        for tree in tree_file.trees:
            number = len(blocks)
            blocks.append(json_script_element(f"tree-{number}", tree.json_text))
            entries.append({**tree.index_entry, "block": number})
        files.append(
            {
                "key": tree_file.key,
                "label": tree_file.label,
                "total": tree_file.num_trees,
                "trees": entries,
            }
        )
    step_keys = [file["key"] for file in files if str(file["key"]).startswith("step_")]
    start = step_keys[-1] if step_keys else files[-1]["key"] if files else ""
    index = {"most": max_entropy, "start": start, "files": files}
    return Markup("\n").join([*blocks, json_script_element("tree-index", json_for_script(index))])


@dataclass(slots=True, kw_only=True, frozen=True)
class TreeFileSize:
    """Number of trees of a file and their bytes on the page."""

    num_bytes: int
    num_trees: int


def select_trees(files: Sequence[TreeFileSize], budget_bytes: int) -> list[list[int]]:
    """Return the indices of the selected trees of each file; empty for skipped files."""
    selected: list[list[int]] = [[] for _ in files]
    file_indices = _select_files(files, budget_bytes)
    remaining_bytes, ascending = (
        budget_bytes,
        sorted(file_indices, key=lambda index: files[index].num_bytes),
    )
    for position, index in enumerate(ascending):
        size = files[index]
        share = remaining_bytes // (len(ascending) - position)
        number = size.num_trees
        if size.num_bytes > share:
            number = max(1, share * size.num_trees // size.num_bytes)
        selected[index] = evenly_spaced_indices(size.num_trees, number)
        remaining_bytes = max(
            0, remaining_bytes - size.num_bytes * number // max(1, size.num_trees)
        )
    return selected


def evenly_spaced_indices(number: int, max_indices: int) -> list[int]:
    """Return `max_indices` evenly spaced indices of 0 ... number-1, with both ends if possible."""
    if max_indices >= number:
        return list(range(number))
    if max_indices <= 1:
        return [0][:max_indices]
    return [round(index * (number - 1) / (max_indices - 1)) for index in range(max_indices)]


def _select_files(files: Sequence[TreeFileSize], budget_bytes: int) -> list[int]:
    """Return as many files as can show `MIN_TREES_PER_FILE` on average, evenly spaced."""
    non_empty = [index for index, size in enumerate(files) if size.num_trees > 0]
    if not non_empty:
        return []
    needed_bytes = [
        files[index].num_bytes
        * min(MIN_TREES_PER_FILE, files[index].num_trees)
        / files[index].num_trees
        for index in non_empty
    ]
    num_fitting = int(budget_bytes / max(1.0, sum(needed_bytes) / len(needed_bytes)))
    return [
        non_empty[position]
        for position in evenly_spaced_indices(len(non_empty), max(2, num_fitting))
    ]
