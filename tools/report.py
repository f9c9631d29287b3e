"""Writes the report page of a run: one HTML file that opens from disk.

    python tools/report.py RUN_FOLDER [--out FILE] [--megabytes N]

The run may be over, under way or killed. `--megabytes`: how much of the page rollout trees may
take; the page says what was left out.
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
    """Parse and write; 2 for a folder that is none of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_folder", type=Path, help="folder of a run, with its metrics.jsonl")
    parser.add_argument("--out", type=Path, help="the page (default: report.html in the folder)")
    parser.add_argument("--megabytes", type=int, default=20, help="of rollout trees (%(default)s)")
    options = parser.parse_args(arguments)
    # Imported here because the package is found through ROOT where it is not installed.
    from mega_agentrl.train.run_report import write_report

    try:
        budget_bytes = max(0, options.megabytes) * 1_000_000
        path = write_report(options.run_folder, options.out, budget_bytes=budget_bytes)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
