"""Compares finished or running runs, or the runs of a sweep, in one table and plot.

    python tools/compare_runs.py FOLDER ... [--out FOLDER]

A folder is that of a run or of a sweep (`python -m mega_agentrl -m ...`). Runs that differ only in
their seed are one row, with mean and standard deviation. Writes `comparison.md`, `comparison.json`
and `comparison.png` to `--out` (default: the first folder).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the runs; return 2 for a folder without runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs or of sweeps")
    parser.add_argument("--out", type=Path, help="where to write (default: the first folder)")
    args = parser.parse_args(arguments)
    # Imported here because the package may be found only through ROOT.
    from mega_agentrl.train.sweep import compare_run_dirs

    try:
        print(compare_run_dirs(args.folders, args.out or args.folders[0]))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
