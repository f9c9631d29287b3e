"""`python -m mega_agentrl`: listens for signals first, as everything else takes seconds to import.

A USR1 that nobody listened for would kill the process, and the queue would think it failed.
"""

from __future__ import annotations

import sys

from mega_agentrl.train.stopping import PROCESS, Stopped


def main() -> None:
    """Entry point."""
    PROCESS.listen()
    try:
        from mega_agentrl import command_line

        command_line.main()
    except Stopped as stop:
        print(f"mega_agentrl: interrupted ({stop}) before anything was started", file=sys.stderr)
        sys.exit(PROCESS.exit_code)


if __name__ == "__main__":
    main()
