"""The report page of a run, from what the run left in its folder.

Reads `metrics.jsonl`, `config.yaml` and the trees under `rollouts/`; writes `report.html` beside
them. Works on a run that is still going on or that was killed: what is missing is left out, and
the page says what. Trees are taken up to a number of bytes (`report.tree_budget`); of a file
that is too large to read as a whole only the first part is looked at. The text of single tokens
is shown where there is a `tokenizer.json`: in the folder's `model/`, or in `model.path`.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from mega_agentrl.report.config_diff import default_config, differences, read_config
from mega_agentrl.report.metric_log import read_metrics
from mega_agentrl.report.page import Page, render_page
from mega_agentrl.report.pieces import Pieces
from mega_agentrl.report.tree_blocks import TreeBlock, TreeShelf, colour_end, tree_block
from mega_agentrl.report.tree_budget import FileSize, choose_trees
from mega_agentrl.report.tree_view import sampled_entropies, tree_view
from mega_agentrl.rollout.nodes import to_tree
from mega_agentrl.rollout.tree_file import read_trees
from mega_agentrl.train.advantage_file import read_advantages
from mega_agentrl.train.rollout_files import FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

REPORT_FILE = "report.html"
BUDGET_BYTES = 20_000_000
READ_BYTES = 200_000_000
"""Bytes of tree files that are read at most."""


def write_report(
    run_dir: Path, out: Path | None = None, *, budget_bytes: int = BUDGET_BYTES
) -> Path:
    """Write the page; returns where it is.

    out: the file, `report.html` in the run folder by default. budget_bytes: of all trees on the
    page. Raises `ValueError` for a folder without metrics and without trees.
    """
    path = out or run_dir / REPORT_FILE
    text = render_page(_page(run_dir, budget_bytes))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def _page(run_dir: Path, budget_bytes: int) -> Page:
    log = read_metrics(run_dir / "metrics.jsonl")
    tree_files = sorted((run_dir / FOLDER).glob("*.jsonl"), key=_order)
    if not log.lines and not tree_files:
        raise ValueError(
            f"{run_dir}: no metrics.jsonl with a whole line and no {FOLDER}/*.jsonl there, "
            "expected the folder of a run; has the run written its first step?"
        )
    config = read_config(run_dir / "config.yaml")
    gathered = _Gathered(_cutter(run_dir, config), budget_bytes)
    notes = gathered.take(tree_files)
    if log.num_unread:
        notes.append(f"Lines of metrics.jsonl that cannot be read: {log.num_unread}.")
    defaults = default_config()
    shown = differences({key: value for key, value in config.items() if key != "run_dir"}, defaults)
    return Page(
        title=run_dir.resolve().name,
        lead=_lead(config),
        log=log,
        differences=shown,
        shelves=gathered.shelves,
        most_entropy=colour_end(gathered.entropies),
        notes=notes,
    )


class _Gathered:
    """The trees that were taken so far, under a budget of bytes."""

    def __init__(self, cut: Callable[[Sequence[int]], list[str]] | None, budget_bytes: int) -> None:
        self.shelves: list[TreeShelf] = []
        self.entropies: list[float] = []
        self._cut = cut
        self._left = budget_bytes
        self._budget = budget_bytes

    def take(self, paths: Sequence[Path]) -> list[str]:
        """Take from each file what is chosen; returns what to say about the rest."""
        notes: list[str] = []
        if self._cut is None and paths:
            notes.append("No tokenizer.json was found: tokens are shown without their texts.")
        sizes = [self._size(path, READ_BYTES // len(paths)) for path in paths]
        for path, wanted in zip(paths, choose_trees(sizes, self._budget), strict=True):
            if wanted:
                notes += self._shelve(path, wanted)
        total = sum(_num_trees(path) for path in paths)
        shown = sum(len(shelf.blocks) for shelf in self.shelves)
        if shown < total:
            notes.append(
                f"{shown:,} of {total:,} rollout trees are on this page, chosen evenly; the others "
                f"are in {FOLDER}/ of the run."
            )
        return notes

    def _shelve(self, path: Path, wanted: Sequence[int]) -> list[str]:
        """Take these trees of a file; of a broken one those before the break."""
        blocks: list[TreeBlock] = []
        label, notes = path.stem, []
        try:
            advantages = read_advantages(path)
            for index, stored in enumerate(islice(read_trees(path), wanted[-1] + 1)):
                label = _label(stored.stage, stored.step)
                if index in wanted:
                    tree = to_tree(stored.tree)
                    block = tree_block(index, tree_view(tree, self._cut, advantages))
                    if block.num_bytes > self._left:
                        break
                    self._left -= block.num_bytes
                    self.entropies += sampled_entropies(tree)
                    blocks.append(block)
        except ValueError as error:
            notes.append(f"Trees that cannot be read: {error}")
        shelf = TreeShelf(key=path.stem, label=label, num_trees=_num_trees(path), blocks=blocks)
        self.shelves.append(shelf)
        return notes

    def _size(self, path: Path, read_bytes: int) -> FileSize:
        """Bytes on the page and trees of the part that is read: the first `read_bytes` at most.

        What a tree takes on the page is guessed from the first one.
        """
        num_bytes, num_trees = path.stat().st_size, max(1, _num_trees(path))
        if num_bytes > read_bytes:
            part = max(1, num_trees * read_bytes // num_bytes)
            num_bytes, num_trees = num_bytes * part // num_trees, part
        return FileSize(num_bytes=round(num_bytes * self._ratio(path)), num_trees=num_trees)

    def _ratio(self, path: Path) -> float:
        """Bytes on the page per byte in the file; 1 where the first tree cannot be read."""
        with path.open("rb") as file:
            in_file = len(file.readline())
        try:
            stored = next(read_trees(path))
        except ValueError:
            return 1.0
        return tree_block(0, tree_view(to_tree(stored.tree), self._cut)).num_bytes / in_file


def _order(path: Path) -> tuple[int, str]:
    """Before training, the steps, after it."""
    name = path.stem.removeprefix("held_out_")
    return (0 if "before" in name else 1 if name.startswith("step_") else 2, name)


def _label(stage: str, step: int) -> str:
    if stage == "rl":
        return f"RL step {step}"
    return f"{stage.replace('_', ' ')} (after step {step})"


def _num_trees(path: Path) -> int:
    """As the first line says; 0 where it says nothing."""
    with path.open("rb") as file:
        try:
            number = json.loads(file.readline())["num_trees"]
        except (ValueError, KeyError, TypeError):
            return 0
    return number if isinstance(number, int) else 0


def _cutter(
    run_dir: Path, config: Mapping[str, Any]
) -> Callable[[Sequence[int]], list[str]] | None:
    """Token ids to the text of each, by the first tokenizer that is there."""
    # Not through transformers, whose import takes longer than all the rest.
    for folder in (run_dir / "model", Path(str(config.get("model.path") or run_dir / "model"))):
        if (folder / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            return Pieces(partial(tokenizer.decode, skip_special_tokens=False)).of
    return None


def _lead(config: Mapping[str, Any]) -> str:
    """The run in one line."""
    if not config:
        return "The run folder has no config.yaml."
    prompts = config.get("data.prompts_per_step")
    parts = [
        str(config.get("model.path", "")),
        str(config.get("algo.advantage", "")),
        f"branching {config.get('rollout.branching')}",
        f"{prompts} prompts x {config.get('rollout.num_trajectories')} trajectories a step",
        f"learning rate {config.get('optim.lr')}",
        f"seed {config.get('seed')}",
    ]
    return " · ".join(part for part in parts if part)
