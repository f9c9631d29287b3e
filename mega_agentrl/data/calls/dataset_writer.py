"""Writes all input of the function-calling run into one folder (`task_folder`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mega_agentrl.data.calls.demonstrations import VOCABULARY, format_tools, make_demonstrations
from mega_agentrl.data.calls.requests import Request, make_requests
from mega_agentrl.data.generated.entity_splits import Split, make_split_inventories
from mega_agentrl.data.generated.settings import TaskSettings
from mega_agentrl.data.generated.task_folder import (
    TaskContent,
    open_task_folder,
    write_task_folder,
)


def write_calls_dataset(folder: Path, settings: TaskSettings) -> None:
    """Write the folder, replacing its files; equal settings give equal bytes.

    Raises:
        ValueError: the settings ask for more requests than exist.
    """
    inventories = make_split_inventories(settings.seed)
    requests = {
        split: make_requests(
            split,
            inventories[split].entities,
            num_requests=size,
            seed=settings.seed,
        )
        for split, size in settings.split_sizes.items()
    }
    demonstrations = make_demonstrations(
        requests[Split.train],
        num_demonstrations=settings.num_demonstrations,
        seed=settings.seed,
    )
    content = TaskContent(
        rows={
            split: [make_calls_row(request, i, split) for i, request in enumerate(requests[split])]
            for split in Split
        },
        demonstrations=demonstrations,
        vocabulary=VOCABULARY,
    )
    open_task_folder(folder)
    write_task_folder(folder, settings, content)


def make_calls_row(request: Request, index: int, split: Split) -> dict[str, Any]:
    """Return a request as a row of the RL format, with its catalogue as `tools`."""
    return {
        "data_source": request.data_source,
        "prompt": [{"role": "user", "content": request.text}],
        "tools": format_tools(request.catalogue),
        "ability": "function_calling",
        "reward_model": {"style": "rule", "ground_truth": request.ground_truth},
        "extra_info": {"split": str(split), "index": index},
    }
