"""Check the settings of the prompts that need the file system or another section.

Remote files are not checked here. With a user dataset class, `data.train` may be anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mega_agentrl.config.enums import Truncation
from mega_agentrl.config.sections.data_files import parse_data_files

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

_CUTTING_MODES = (Truncation.left, Truncation.right, Truncation.middle)


def check_data(config: TrainConfig) -> None:
    """Raise a `ValueError` for the first condition that `config` violates."""
    data = config.data
    for key, value in (("data.train", data.train), ("data.validation", data.validation)):
        files = parse_data_files(value, key)
        if not files:
            raise ValueError(f"{key} is empty: expected a file; probable cause: it was never set")
        for file in files:
            if file.local_path is not None and not data.dataset_class:
                check_file_exists(key, file.local_path)
    if data.prompt_template:
        check_file_exists("data.prompt_template", data.prompt_template)
    if data.truncation in _CUTTING_MODES and config.rollout.use_inference_chat_template:
        raise ValueError(
            f"data.truncation={data.truncation}: expected error or drop with "
            "rollout.use_inference_chat_template=True, which renders all messages at every turn; "
            "probable cause: only one of the two was changed"
        )


def check_file_exists(key: str, value: str) -> None:
    """Raise a `ValueError` unless the file of a setting exists."""
    if not Path(value).is_file():
        raise ValueError(
            f"{key}={value!r}: there is no such file; expected a path below "
            f"{Path.cwd()} or an absolute path; probable cause: it has not been created yet "
            "(`make smoke` creates those under runs/toolqa), or the working folder is another"
        )
