"""Locate the yaml files of `configs/` and name the folders of a sweep.

In the repository the yaml files are at the top level, because users edit them; `setup.py` installs
them as `mega_agentrl/configs`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

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
    raise ValueError(
        f"configuration: {ROOT_FILE} is in neither {candidates[0]} (installed) nor "
        f"{candidates[1]} (checkout); probable cause: an incomplete copy or installation"
    )


def sweep_dir_name(overrides: str, limit: int = 80) -> str:
    """Return a folder name for the overrides of a sweep's job.

    Paths are shortened to their last part. Names longer than `limit` are cut and end with a hash,
    so that they remain unique.
    """
    shortened = [_shorten_path_value(item) for item in overrides.split(",")]
    name = ",".join(shortened)
    if len(name) > limit:
        digest = hashlib.sha256(overrides.encode()).hexdigest()[:8]
        name = f"{name[: limit - len(digest) - 1].rstrip('.,=')}-{digest}"
    return name.rstrip(".,=") or "defaults"


def _shorten_path_value(item: str) -> str:
    key, equals, value = item.partition("=")
    return f"{key.replace('/', '_')}{equals}{value.rstrip('/').rpartition('/')[2]}"
