"""Options and cases of a benchmark, the JSON line of a case, and peak memory."""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from mega_agentrl.estimate.device import MIB
from mega_agentrl.estimate.host_memory import ResidentMemory


def add_quick_option(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, **quick: object
) -> None:
    """Add `--quick` to a parser that has all other options.

    Args:
        parser: The parser.
        arguments: Words of the command line; None for those of this process.
        quick: Values that options have with `--quick` unless they are given.
    """
    parser.add_argument(
        "--quick",
        action="store_true",
        help="take seconds: sizes too small for figures that mean something",
    )
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**quick)


def parse_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, **quick: object
) -> argparse.Namespace:
    """Return the options of a command line, with `--quick` as in `add_quick_option`."""
    add_quick_option(parser, arguments, **quick)
    return parser.parse_args(arguments)


def select_cases(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the names that a pattern of `--cases` matches, in their own order.

    Args:
        patterns: shell patterns over the whole name; one text may contain several, separated by
            commas.
        names: names of all cases.

    Raises:
        ValueError: no name matches; the message lists the names.
    """
    parts = [part for text in patterns for part in text.split(",")]
    chosen = [name for name in names if any(fnmatchcase(name, part) for part in parts)]
    if not chosen:
        raise ValueError("\n  ".join([f"--cases {' '.join(parts)}: no such case among", *names]))
    return chosen


def bench_line(
    bench: str, case: str, unit: str, ours: float | None, baseline: float | None
) -> dict[str, object]:
    """Return the line with the keys bench, case, unit, ours, baseline and ratio.

    ratio = baseline / ours, so that a larger ratio is better. None means not measured; the ratio is
    also None if `ours` is 0.
    """
    has_ratio = ours and baseline is not None
    return {
        "bench": bench,
        "case": case,
        "unit": unit,
        "ours": None if ours is None else round(ours, 6),
        "baseline": None if baseline is None else round(baseline, 6),
        "ratio": round(baseline / ours, 4) if has_ratio else None,
    }


class PeakMemory:
    """Measures the peak of this process's memory beyond what was resident at construction.

    Args:
        trim: whether to return freed memory to the system first, so that reusing it counts.
    """

    def __init__(self, *, trim: bool = True) -> None:
        if trim:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        before = ResidentMemory.current()
        self._resident_bytes = before.private_bytes + before.file_bytes + before.shared_bytes
        self._shared_bytes = before.shared_bytes

    def peak_mib(self) -> float:
        """Return the peak in MiB."""
        return (ResidentMemory.current().peak_bytes - self._resident_bytes) / MIB

    def private_peak_mib(self) -> float:
        """Return the peak in MiB without shared memory.

        A receiver that reads frames in the sender's memory has the sender's pages mapped.
        """
        return self.peak_mib() - (ResidentMemory.current().shared_bytes - self._shared_bytes) / MIB
