"""The lines of a run's `metrics.jsonl`."""

import json
from pathlib import Path


def metric_lines(run_dir, stage=None):
    """Return the lines in order, those of one stage if it is given."""
    text = (Path(run_dir) / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if stage in (None, line["stage"])]
