"""Places: where the yaml files of `configs/` lie, and what the folders of a sweep are called.

In the repository they are at the top level, because users edit them; `setup.py` puts them into
the wheel as `mega_agentrl/configs`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT_FILE = "train.yaml"
_PACKAGE = Path(__file__).resolve().parents[1]


def config_folder(package: Path = _PACKAGE) -> Path:
    """The folder that holds `train.yaml` and the config groups.

    package: folder of `mega_agentrl`. Raises `ValueError` naming both places when neither
    holds the file.
    """
    candidates = (package / "configs", package.parent / "configs")
    for folder in candidates:
        if (folder / ROOT_FILE).is_file():
            return folder
    raise ValueError(
        f"configuration: {ROOT_FILE} is in neither {candidates[0]} (installed) nor "
        f"{candidates[1]} (checkout); probable cause: an incomplete copy or installation"
    )


def folder_name(overrides: str, limit: int = 80) -> str:
    """Overrides of a sweep's job as one folder name: of a path its last part, not too long.

    Where something is cut off, a hash of all of it stands for it: names stay different.
    """
    kept = [_last_part(item) for item in overrides.split(",")]
    name = ",".join(kept)
    if len(name) > limit:
        digest = hashlib.sha256(overrides.encode()).hexdigest()[:8]
        name = f"{name[: limit - len(digest) - 1].rstrip('.,=')}-{digest}"
    return name.rstrip(".,=") or "defaults"


def _last_part(item: str) -> str:
    key, equals, value = item.partition("=")
    return f"{key.replace('/', '_')}{equals}{value.rstrip('/').rpartition('/')[2]}"
