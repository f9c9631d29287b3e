"""Folders of the generated tasks, written once."""

from __future__ import annotations

from functools import cache

import pytest

from mega_agentrl.data.calls.dataset_writer import write_calls_dataset
from mega_agentrl.data.generated.settings import GeneratedTask, TaskSettings
from mega_agentrl.data.orders.dataset_writer import write_orders_dataset
from mega_agentrl.data.vision_qa.dataset_writer import write_vision_dataset

WRITERS = {
    GeneratedTask.calls: write_calls_dataset,
    GeneratedTask.orders: write_orders_dataset,
    GeneratedTask.vision: write_vision_dataset,
}


@pytest.fixture(scope="session")
def write_task():
    """Return a function that writes a small data set of a task and returns its settings."""

    def write(task, folder):
        settings = TaskSettings(
            task=task, num_train=90, num_dev=30, num_validation=30, num_demonstrations=200
        )
        WRITERS[task](folder, settings)
        return settings

    return write


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory, write_task):
    """Return a function that returns the folder of a task, which must not be changed."""

    @cache
    def folder_of(task):
        folder = tmp_path_factory.mktemp(str(task))
        write_task(task, folder)
        return folder

    return folder_of
