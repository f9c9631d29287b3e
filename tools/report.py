"""Writes the report page of a run: one self-contained HTML file.

    python tools/report.py RUN_FOLDER [--out FILE] [--megabytes N]

The run may be finished, running or killed. `--megabytes` limits the size of the rollout trees; the
page names what was left out.
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
    """Write the page; return 2 if the folder is not that of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_folder", type=Path, help="folder of a run, with its metrics.jsonl")
    parser.add_argument("--out", type=Path, help="the page (default: report.html in the folder)")
    parser.add_argument("--megabytes", type=int, default=20, help="of rollout trees (%(default)s)")
    args = parser.parse_args(arguments)
    # Imported here because the package may be found only through ROOT.
    from mega_agentrl.train.output.report_page import write_report

    try:
        budget_bytes = max(0, args.megabytes) * 1_000_000
        path = write_report(args.run_folder, args.out, budget_bytes=budget_bytes)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
