"""Locate the yaml files of `configs/`.

In the repository the yaml files are at the top level, because users edit them; `setup.py` installs
them as `mega_agentrl/configs`.
"""

from __future__ import annotations

from pathlib import Path

from mega_agentrl.errors import InputError

ROOT_FILE = "train.yaml"
_PACKAGE_DIR = Path(__file__).resolve().parents[1]


def find_config_dir(package: Path = _PACKAGE_DIR) -> Path:
    """Return the folder that contains `train.yaml` and the config groups.

    Args:
        package: folder of `mega_agentrl`.

    Raises:
        ValueError: neither of the possible folders contains the file.
    """
    candidates = (package / "configs", package.parent / "configs")
    for folder in candidates:
        if (folder / ROOT_FILE).is_file():
            return folder
    raise InputError(
        f"configuration file {ROOT_FILE}",
        "none",
        f"one in {candidates[0]} (installed) or {candidates[1]} (checkout)",
        "an incomplete copy or installation",
    )
