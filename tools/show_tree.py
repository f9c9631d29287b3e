"""Prints rollout trees that a run saved under `rollouts/` (`report.save_trees_every_steps`).

    python tools/show_tree.py FILE [--prompt ID] [--entropy]

Without `--prompt` all trees of the file are printed. `--entropy` prints the mean entropy at each
token offset of first turns and of turns after a tool's answer instead.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mega_agentrl.types.records import RolloutTree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the trees; return 2 if the file has no trees or no such prompt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="a file of a run's folder rollouts/")
    parser.add_argument("--prompt", help="id of one prompt, as in `question ID: ...`")
    parser.add_argument("--entropy", action="store_true", help="entropy by token offset instead")
    args = parser.parse_args(arguments)
    try:
        lines = _entropy_lines if args.entropy else _tree_lines
        for line in lines(_trees(args.file, args.prompt)):
            print(line)
    except BrokenPipeError:
        # The reader closed the pipe; discard what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _trees(path: Path, prompt_id: str | None) -> Iterator[RolloutTree]:
    # Imported here because the package may be found only through ROOT.
    from mega_agentrl.rollout.io.nodes import to_rollout_tree
    from mega_agentrl.rollout.io.tree_file import read_trees

    prompt_ids: list[str] = []
    matched = False
    for stored in read_trees(path):
        prompt_ids.append(stored.tree.prompt.prompt_id)
        if prompt_id in (None, prompt_ids[-1]):
            matched = True
            yield to_rollout_tree(stored.tree)
    if not matched:
        shown_ids = ", ".join(prompt_ids[:5]) + (", ..." if len(prompt_ids) > 5 else "")
        raise ValueError(f"{path}: got --prompt {prompt_id}, expected one of {shown_ids}")


def _tree_lines(trees: Iterator[RolloutTree]) -> Iterator[str]:
    from mega_agentrl.rollout.io.render import render_tree

    for tree in trees:
        yield f"{render_tree(tree)}\n"


def _entropy_lines(trees: Iterator[RolloutTree]) -> Iterator[str]:
    from mega_agentrl.rollout.metrics.entropy import (
        NUM_OFFSETS,
        EntropyCurves,
        collect_entropy_curves,
    )

    curve = EntropyCurves()
    for tree in trees:
        curve += collect_entropy_curves(tree.trajectories)
    yield "offset   first turn (tokens)   after an answer (tokens)"
    for offset in range(NUM_OFFSETS):
        values = [
            f"{'-' if mean is None else f'{mean:.4f}'} ({means.counts[offset]})"
            for means in (curve.root, curve.after_tool)
            for mean in (means.mean(offset, offset + 1),)
        ]
        yield f"{offset:>6}   {values[0]:<19}   {values[1]}"


if __name__ == "__main__":
    sys.exit(main())
