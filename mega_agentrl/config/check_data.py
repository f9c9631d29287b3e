"""Conditions on the prompts' settings that need the file system or another section.

Whether remote files are there shows when they are fetched; what a dataset class reads is its own
business, so that its `data.train` may name anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.config.choices import Truncation
from mega_agentrl.config.data_files import data_files

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

_CUTS = (Truncation.left, Truncation.right, Truncation.middle)


def check_data(config: TrainConfig) -> None:
    """Raise `ValueError` for the first condition that `config` breaks."""
    data = config.data
    for key, value in (("data.train", data.train), ("data.validation", data.validation)):
        files = data_files(value, key)
        if not files:
            raise ValueError(f"{key} is empty: expected a file; probable cause: it was never set")
        for file in files:
            if file.local_path is not None and not data.dataset_class:
                check_file(key, file.local_path)
    if data.template:
        check_file("data.template", data.template)
    if data.truncation in _CUTS and config.rollout.use_inference_chat_template:
        raise ValueError(
            f"data.truncation={data.truncation}: expected error or drop with "
            "rollout.use_inference_chat_template=True, which renders the whole messages again at "
            "every turn; probable cause: one of them was changed alone"
        )


def check_file(key: str, value: str) -> None:
    """Raise `ValueError` unless the setting names a file that is there."""
    if not Path(value).is_file():
        raise ValueError(
            f"{key}={value!r}: there is no such file; expected one below "
            f"{Path.cwd()} or an absolute path; probable cause: it has not been made yet "
            "(`make smoke` makes those under runs/toolqa), or the run was started elsewhere"
        )
