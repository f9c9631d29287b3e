"""One table and one plot over runs that there are: of a sweep, or any.

    python tools/compare_runs.py FOLDER ... [--out FOLDER]

A folder is one of a run or of a sweep (`python -m mega_agentrl -m ...`), finished or not. Runs that
differ only in their seed are one row, with mean and deviation. Writes `comparison.md`,
`comparison.json` and `comparison.png` into `--out` (default: the first folder).
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
    """Compare; 2 for a folder without runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs or of sweeps")
    parser.add_argument("--out", type=Path, help="where to write (default: the first folder)")
    options = parser.parse_args(arguments)
    # Imported here because the package is found through ROOT where it is not installed.
    from mega_agentrl.train.sweep import compare_folders

    try:
        print(compare_folders(options.folders, options.out or options.folders[0]))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
