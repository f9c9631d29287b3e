"""Converts published data sets to this project's RL parquet.

    python tools/convert_data.py --source bfcl --input FILE... --output FILE [--limit N] [--force]

Reads local parquet, json or jsonl files and writes one parquet file; nothing is downloaded. The
formats of the sources are described in `mega_agentrl/data/converters/`.

If ground truths are function calls, the reward must give each ground truth 1 as an answer. Other
rows are left out, counted and named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mega_agentrl.data.converters.file_io import (
    check_output_path,
    read_source_rows,
    write_rl_parquet,
)
from mega_agentrl.data.converters.function_calls import example_answer
from mega_agentrl.data.converters.registry import SOURCES, convert_rows
from mega_agentrl.reward.function_call import score


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert the files and print a summary; return 2 if they cannot be converted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--source", required=True, choices=list(SOURCES))
    parser.add_argument("--input", required=True, type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE")
    parser.add_argument("--limit", type=int, metavar="N", help="write the first N rows only")
    parser.add_argument("--force", action="store_true", help="write over an existing file")
    args = parser.parse_args(arguments)
    try:
        _convert(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _convert(args: argparse.Namespace) -> None:
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit {args.limit}: expected at least 1")
    check_output_path(args.output, force=args.force)
    source_rows = read_source_rows(args.input)
    converted = convert_rows(args.source, source_rows)
    rows = converted.rows
    if SOURCES[args.source].has_calls:
        rows = [row for row in rows if _ground_truth_scores_full(row)]
    num_left_out = len(converted.rows) - len(rows)
    if num_left_out:
        converted.notes["left out: the reward cannot parse the ground truth"] = num_left_out
    rows = rows[: args.limit]
    write_rl_parquet(rows, args.output, force=args.force)
    print(f"{args.output}: {len(rows)} rows from {len(source_rows)} of {args.source}")
    for note, times in sorted(converted.notes.items()):
        print(f"{note}: {times}")


def _ground_truth_scores_full(row: dict[str, Any]) -> bool:
    truths = row["reward_model"]["ground_truth"]
    for truth in [truths] if isinstance(truths, str) else truths:
        try:
            if score(f"</think>{example_answer(truth)}", truth).value == 1.0:
                continue
            reason = "it does not score 1 against itself"
        except ValueError as error:
            reason = str(error)
        print(f"left out {row['extra_info']['index']}: {reason}", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
