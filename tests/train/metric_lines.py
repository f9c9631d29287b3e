"""The lines of a run's `metrics.jsonl`."""

import json
from pathlib import Path


def metric_lines(run_dir, stage=None):
    """Return the lines in order, those of one stage if it is given."""
    text = (Path(run_dir) / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if stage in (None, line["stage"])]


def check_mismatch(lines, bound, names=("logp_mean_abs",)):
    """Check the gaps between policy and engine in the RL steps that have them.

    The policy does not score groups without signal, so a step of such groups alone has none.
    """
    scored = [line for line in lines if "mismatch/logp_mean_abs" in line]
    assert scored, "no step had a group whose rewards differ"
    for line in scored:
        for name in names:
            assert line[f"mismatch/{name}"] < bound
