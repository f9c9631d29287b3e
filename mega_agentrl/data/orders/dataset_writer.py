"""Writes all input of the order game's run into one folder (`task_folder`).

Besides the files of every generated task, the folder gets `interaction.yaml`, which names the class
of the simulated customer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mega_agentrl.data.generated.entity_splits import Split
from mega_agentrl.data.generated.settings import TaskSettings
from mega_agentrl.data.generated.task_folder import (
    TaskContent,
    open_task_folder,
    write_task_folder,
)
from mega_agentrl.data.orders.demonstrations import VOCABULARY, make_demonstrations
from mega_agentrl.data.orders.orders import DATA_SOURCE, Order, format_order, make_orders

INTERACTION_FILE = "- class_name: mega_agentrl.rollout.interaction.customer.Customer\n"


def write_orders_dataset(folder: Path, settings: TaskSettings) -> None:
    """Write the folder, replacing its files; equal settings give equal bytes."""
    orders = {
        split: make_orders(split, num_orders=size, seed=settings.seed)
        for split, size in settings.split_sizes.items()
    }
    demonstrations = make_demonstrations(
        orders[Split.train],
        num_demonstrations=settings.num_demonstrations,
        seed=settings.seed,
    )
    content = TaskContent(
        rows={
            split: [make_orders_row(order, i, split) for i, order in enumerate(orders[split])]
            for split in Split
        },
        demonstrations=[{"messages": messages} for messages in demonstrations],
        vocabulary=VOCABULARY,
    )
    open_task_folder(folder)
    (folder / "interaction.yaml").write_text(INTERACTION_FILE, encoding="utf-8")
    write_task_folder(folder, settings, content)


def make_orders_row(order: Order, index: int, split: Split) -> dict[str, Any]:
    """Return an order as a row of the RL format, with the values that its customer knows."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": order.greeting}],
        "ability": "dialogue",
        "reward_model": {"style": "rule", "ground_truth": format_order(order.wanted_values)},
        "extra_info": {
            "split": str(split),
            "index": index,
            "interaction_kwargs": {"values": dict(order.values), "wanted": list(order.wanted)},
        },
    }
