"""Entry point of `python -m mega_agentrl`.

Installs the signal handlers before anything else is imported, because the imports take seconds: an
unhandled USR1 during that time would kill the process, and Slurm would count the job as failed.
"""

from __future__ import annotations

import sys

from mega_agentrl.train.signals import PROCESS_SIGNAL_HANDLER, RunInterrupted


def main() -> None:
    """Install the signal handlers, then run the command line."""
    PROCESS_SIGNAL_HANDLER.install()
    try:
        from mega_agentrl import cli

        cli.main()
    except RunInterrupted as stop:
        print(f"mega_agentrl: interrupted ({stop}) before anything was started", file=sys.stderr)
        sys.exit(PROCESS_SIGNAL_HANDLER.exit_code)


if __name__ == "__main__":
    main()
