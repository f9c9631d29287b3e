"""Places: where the yaml files of `configs/` lie, and what the folders of a sweep are called.

In the repository they are at the top level, because users edit them; `setup.py` puts them into
the wheel as `mega_agentrl/configs`.
"""

from __future__ import annotations

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


def folder_name(overrides: str, limit: int = 120) -> str:
    """Overrides of a sweep's job as one folder name: no separators, not too long."""
    return overrides.replace("/", "_")[:limit].rstrip(".,=") or "defaults"
