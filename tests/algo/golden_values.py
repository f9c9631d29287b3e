"""Values that the reference implementations computed, from `tests/golden`."""

import json
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[1] / "golden"


def load_golden(name):
    """Return the contents of the JSON file `name`."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def group_indices(names):
    """Return the group of each trajectory, numbered as the names appear."""
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([order[name] for name in names])
