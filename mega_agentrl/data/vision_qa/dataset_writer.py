"""Writes all input of the vision run into one folder (`task_folder`)."""

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
from mega_agentrl.data.vision_qa.demonstrations import (
    VOCABULARY,
    ZOOM_TOOL,
    format_images,
    format_question,
    make_demonstrations,
)
from mega_agentrl.data.vision_qa.questions import Question, make_questions, split_figures


def write_vision_dataset(folder: Path, settings: TaskSettings) -> None:
    """Write the folder, replacing its files; equal settings give equal bytes."""
    figures = split_figures(settings.seed)
    questions = {
        split: make_questions(
            split,
            figures,
            num_questions=size,
            seed=settings.seed,
            blank_images=settings.blank_images,
        )
        for split, size in settings.split_sizes.items()
    }
    content = TaskContent(
        rows={
            split: [make_vision_row(question, i, split) for i, question in enumerate(asked)]
            for split, asked in questions.items()
        },
        demonstrations=make_demonstrations(
            questions[Split.train],
            num_demonstrations=settings.num_demonstrations,
            seed=settings.seed,
        ),
        vocabulary=VOCABULARY,
    )
    open_task_folder(folder)
    write_task_folder(folder, settings, content)


def make_vision_row(question: Question, index: int, split: Split) -> dict[str, Any]:
    """Return a question as a row of the RL format, which offers the tool `zoom`."""
    return {
        "data_source": question.data_source,
        "prompt": [format_question(question)],
        "images": format_images([question.picture.draw()]),
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {
            "split": str(split),
            "index": index,
            "tools_kwargs": {ZOOM_TOOL: {"create_kwargs": None}},
        },
    }
