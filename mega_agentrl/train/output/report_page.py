"""Build the report page of a run from the files in its folder.

Reads `metrics.jsonl`, `config.yaml` and the trees under `rollouts/`, and writes `report.html` into
the same folder. It also works for a run that is still active or was killed: missing parts are left
out, and the page lists them. The number of bytes of trees is limited (`select_trees`); of a file
that is too large to read, only the first part is used. Token texts are shown if there is a
`tokenizer.json` in the folder's `model/` or in `model.path`.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from mega_agentrl.errors import InputError
from mega_agentrl.report.config_diff import diff_configs, read_config, schema_defaults
from mega_agentrl.report.metrics_file import read_metrics
from mega_agentrl.report.page.render import ReportPage, render_page
from mega_agentrl.report.run_start import read_starts
from mega_agentrl.report.tree_viewer.embedded_trees import (
    EmbeddedTree,
    TreeFileSize,
    TreeFileView,
    embed_tree,
    max_colour_entropy,
    select_trees,
)
from mega_agentrl.report.tree_viewer.tree_json import TokenTexts, sampled_entropies, tree_to_json
from mega_agentrl.rollout.io.image_files import find_image
from mega_agentrl.rollout.io.nodes import to_rollout_tree
from mega_agentrl.rollout.io.tree_file import read_trees
from mega_agentrl.train.output.rollout_files import ROLLOUT_DIR, read_advantages
from mega_agentrl.train.resume.run_dir import METRICS_FILE
from mega_agentrl.types.atomic_file import atomic_write

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mega_agentrl.types.records import RolloutTree

REPORT_FILE = "report.html"
MAX_PAGE_TREE_BYTES = 20_000_000
MAX_TREE_BYTES_READ = 200_000_000
"""Upper limit on the bytes of tree files that are read."""

INTERRUPTED_TIMEOUT_S = 5.0
"""Seconds for the page after a signal: usually KILL follows 30 s after TERM."""

FAILED_TIMEOUT_S = 60.0
"""Seconds for the page of a failed run."""

_logger = logging.getLogger(__name__)


def write_report(
    run_dir: Path,
    out: Path | None = None,
    *,
    budget_bytes: int = MAX_PAGE_TREE_BYTES,
    failure: str = "",
) -> Path:
    """Write the page and return its path.

    Args:
        run_dir: Folder of the run.
        out: The page; by default `report.html` in the run folder.
        budget_bytes: Upper limit on the size of all trees on the page.
        failure: Why the run has failed; empty if it has not.

    Raises:
        ValueError: The folder has neither metrics nor trees.
    """
    path = out or run_dir / REPORT_FILE
    text = render_page(replace(_load_page(run_dir, budget_bytes), failure=failure))
    atomic_write(path, text)
    return path


def _load_page(run_dir: Path, budget_bytes: int) -> ReportPage:
    log = read_metrics(run_dir / METRICS_FILE)
    tree_files = sorted((run_dir / ROLLOUT_DIR).glob("*.jsonl"), key=_file_order)
    if not log.lines and not tree_files:
        raise EmptyRunError(
            str(run_dir),
            f"no {METRICS_FILE} with a whole line and no {ROLLOUT_DIR}/*.jsonl",
            "the folder of a run",
            "the run has not written its first step",
        )
    config = read_config(run_dir / "config.yaml")
    loader = _TreeLoader(_load_token_splitter(run_dir, config), budget_bytes)
    notes = loader.load_files(tree_files)
    if log.num_unreadable_lines:
        notes.append(f"Lines of metrics.jsonl that cannot be read: {log.num_unreadable_lines}.")
    defaults = schema_defaults()
    differences = diff_configs(
        {key: value for key, value in config.items() if key != "run_dir"}, defaults
    )
    return ReportPage(
        title=run_dir.resolve().name,
        subtitle=_run_subtitle(config),
        log=log,
        config_differences=differences,
        starts=read_starts(run_dir),
        tree_files=loader.tree_files,
        max_colour_entropy=max_colour_entropy(loader.entropies),
        notes=notes,
    )


class _TreeLoader:
    """Loads trees under a budget of bytes."""

    def __init__(
        self, split_tokens: Callable[[Sequence[int]], list[str]] | None, budget_bytes: int
    ) -> None:
        self.tree_files: list[TreeFileView] = []
        self.entropies: list[float] = []
        self._split_tokens = split_tokens
        self._bytes_left = budget_bytes
        self._budget_bytes = budget_bytes

    def load_files(self, paths: Sequence[Path]) -> list[str]:
        """Load the selected trees of each file; return notes about the others."""
        notes: list[str] = []
        if self._split_tokens is None and paths:
            notes.append("No tokenizer.json was found: tokens are shown without their texts.")
        sizes = [self._page_size(path, MAX_TREE_BYTES_READ // len(paths)) for path in paths]
        for path, selected in zip(paths, select_trees(sizes, self._budget_bytes), strict=True):
            if selected:
                notes += self._load_file(path, selected)
        total = sum(_num_trees(path) for path in paths)
        num_shown = sum(len(view.trees) for view in self.tree_files)
        if num_shown < total:
            notes.append(
                f"{num_shown:,} of {total:,} rollout trees are on this page, chosen evenly; the "
                f"others are in {ROLLOUT_DIR}/ of the run."
            )
        return notes

    def _load_file(self, path: Path, selected: Sequence[int]) -> list[str]:
        """Load the selected trees of a file, or of a damaged file those before the damage."""
        blocks: list[EmbeddedTree] = []
        label, notes = path.stem, []
        try:
            advantages = read_advantages(path)
            for index, stored in enumerate(islice(read_trees(path), selected[-1] + 1)):
                label = _tree_file_label(stored.stage, stored.step)
                if index in selected:
                    tree = to_rollout_tree(stored.tree)
                    block = embed_tree(index, self._tree_json(tree, path, advantages))
                    if block.num_bytes > self._bytes_left:
                        break
                    self._bytes_left -= block.num_bytes
                    self.entropies += sampled_entropies(tree)
                    blocks.append(block)
        except ValueError as error:
            notes.append(f"Trees that cannot be read: {error}")
        view = TreeFileView(key=path.stem, label=label, num_trees=_num_trees(path), trees=blocks)
        self.tree_files.append(view)
        return notes

    def _page_size(self, path: Path, read_bytes: int) -> TreeFileSize:
        """Return the bytes on the page and the trees of the part that is read.

        The size of a tree on the page is estimated from the first one.
        """
        num_bytes, num_trees = path.stat().st_size, max(1, _num_trees(path))
        if num_bytes > read_bytes:
            num_read = max(1, num_trees * read_bytes // num_bytes)
            num_bytes, num_trees = num_bytes * num_read // num_trees, num_read
        return TreeFileSize(
            num_bytes=round(num_bytes * self._page_bytes_per_file_byte(path)), num_trees=num_trees
        )

    def _page_bytes_per_file_byte(self, path: Path) -> float:
        """Return bytes on the page per byte in the file; 1 if the first tree is unreadable."""
        with path.open("rb") as file:
            line_bytes = len(file.readline())
        try:
            stored = next(read_trees(path))
        except ValueError:
            return 1.0
        tree = to_rollout_tree(stored.tree)
        return embed_tree(0, self._tree_json(tree, path)).num_bytes / line_bytes

    def _tree_json(
        self, tree: RolloutTree, path: Path, advantages: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        find = partial(find_image, path.parent)
        return tree_to_json(tree, self._split_tokens, advantages, find)


def _file_order(path: Path) -> tuple[int, str]:
    """Sort key: validation before training, the steps, validation after it."""
    name = path.stem.removeprefix("held_out_")
    return (0 if "before" in name else 1 if name.startswith("step_") else 2, name)


def _tree_file_label(stage: str, step: int) -> str:
    if stage == "rl":
        return f"RL step {step}"
    return f"{stage.replace('_', ' ')} (after step {step})"


def _num_trees(path: Path) -> int:
    """Return the number in the file's first line; 0 without one."""
    with path.open("rb") as file:
        try:
            number = json.loads(file.readline())["num_trees"]
        except (ValueError, KeyError, TypeError):
            return 0
    return number if isinstance(number, int) else 0


def _load_token_splitter(
    run_dir: Path, config: Mapping[str, Any]
) -> Callable[[Sequence[int]], list[str]] | None:
    """Return a function from token ids to their texts, or None without a tokenizer."""
    # `tokenizers` alone, because importing transformers takes several seconds.
    for folder in (run_dir / "model", Path(str(config.get("model.path") or run_dir / "model"))):
        if (folder / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            return TokenTexts(partial(tokenizer.decode, skip_special_tokens=False)).split
    return None


def _run_subtitle(config: Mapping[str, Any]) -> str:
    """Describe the run in one line."""
    if not config:
        return "The run folder has no config.yaml."
    prompts = config.get("data.prompts_per_step")
    parts = [
        str(config.get("model.path", "")),
        str(config.get("algo.advantage", "")),
        f"branching {config.get('rollout.branching')}",
        f"{prompts} prompts x {config.get('rollout.group_size')} trajectories a step",
        f"learning rate {config.get('optim.lr')}",
        f"seed {config.get('seed')}",
    ]
    return " · ".join(part for part in parts if part)


class EmptyRunError(InputError):
    """There is nothing to show yet."""


class _ReportTimeout(BaseException):
    """The time limit is over. A `BaseException`, so that the report code does not catch it."""


def write_interrupted_report(run_dir: Path, *, deadline_s: float, failure: str = "") -> bool:
    """Write the page of a run that was stopped or has failed; return whether it was written.

    Call it last, after the run is saved, its processes have ended and its error is printed: the
    process may be killed soon after the signal. An alarm in the main thread stops the report after
    `deadline_s`. Nothing is raised, not even at Ctrl-C, so that the run's own error and exit code
    remain. If no page was written, a line in `logs/driver.log` says why. The page begins with
    `failure`, the message of the error.
    """
    try:
        with _time_limit(deadline_s):
            write_report(run_dir, failure=failure)
    except _ReportTimeout:
        _logger.warning("no report page: it was not written within %g s", deadline_s)
    except KeyboardInterrupt:
        _logger.warning("no report page: interrupted while it was written")
    except EmptyRunError as error:  # only in the log file: the terminal has the run's own error
        _logger.info("no report page: %s", error)
    except Exception:
        _logger.exception("no report page")
    else:
        return True
    return False


@contextmanager
def _time_limit(deadline_s: float) -> Iterator[None]:
    """Raise `_ReportTimeout` in the body after `deadline_s`; no limit outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGALRM, _on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous_handler)


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise _ReportTimeout
