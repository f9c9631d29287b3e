"""The JSON line that every benchmark prints per case."""

from __future__ import annotations


def bench_line(
    bench: str, case: str, unit: str, ours: float | None, baseline: float | None
) -> dict[str, object]:
    """Return the line with the keys bench, case, unit, ours, baseline and ratio.

    ratio = baseline / ours, so more is better. None means not measured or, for the ratio,
    undefined.
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
