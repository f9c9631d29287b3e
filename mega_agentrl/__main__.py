"""Entry point of `python -m mega_agentrl`.

Installs the signal handlers before anything else is imported, because the imports take seconds: an
unhandled USR1 during that time would kill the process, and Slurm would count the job as failed.
"""

from __future__ import annotations

import sys

from mega_agentrl.train.signals import PROCESS_SIGNAL_HANDLER, RunInterrupted


def main() -> None:
    """Install the signal handlers, then run the command line."""
    try:
        # A signal may come between two of the handlers.
        PROCESS_SIGNAL_HANDLER.install()
        from mega_agentrl import cli

        cli.main()
    except KeyboardInterrupt as stop:
        PROCESS_SIGNAL_HANDLER.end_process_at_next_signal()
        is_first = isinstance(stop, RunInterrupted)
        where = f"({stop}) before anything was started" if is_first else "by a second signal"
        print(f"mega_agentrl: interrupted {where}", file=sys.stderr)
        sys.exit(PROCESS_SIGNAL_HANDLER.exit_code)
    except SystemExit:
        if PROCESS_SIGNAL_HANDLER.received_signal is not None:
            PROCESS_SIGNAL_HANDLER.end_process_at_next_signal()
        raise


if __name__ == "__main__":
    main()
